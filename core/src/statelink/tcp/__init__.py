"""The embedded backend. It moves host memory between any two hosts over plain sockets, without a native library.

An author of a backend reads it first, as the reference. Read the modules in this order:

``_backend``, ``_options``
    the methods of the interface, how each works, and what a user may configure.
``_descriptor``, ``_handshake``, ``_listener``
    how two processes find each other and prove who they are.
``_frames``, ``_write``, ``_sender``, ``_inbox``, ``_receiver``
    one WRITE: its frames, its sender and its receiver.
``_copying``
    what copies a batch out of a sender's memory, on several threads.
``_grants``, ``_ranges``
    what a peer may write, and how this is revoked.
``_lingering``
    connections that were given up before the other side was known to have stopped.
``_stream``, ``_iovec``
    sockets and the three system calls underneath.
``_raw``
    a plain connection, without any of this, against which ``statelink bench`` measures the backend.

Threads: one thread listens. For each peer, at most one thread sends and one receives. The thread that uses a connection
also closes it. Other threads only wake it, with two exceptions: whoever submits a batch sends it if nobody else is
sending, and a link's control thread takes replies (`Sender.attend`). The receiving thread has others copy large batches
of this host with it.
"""

from __future__ import annotations

from ._backend import TcpBackend
from ._options import Options

__all__ = ["Options", "TcpBackend"]
