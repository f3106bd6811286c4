"""The embedded backend: plain sockets, no native library, any two hosts, host memory.

It is the reference that an author of a backend reads first. Read the modules in this order:

``_backend``
    the interface's methods, and what each is made of.
``_descriptor``, ``_handshake``, ``_listener``
    how two processes find each other and prove who they are.
``_frames``, ``_sender``, ``_receiver``
    one WRITE: what travels, who sends it, who lets it land.
``_grants``, ``_ranges``
    what a peer may write, and how that is taken back.
``_lingering``
    connections that were given up while nobody knew whether the other side had stopped.
``_stream``, ``_iovec``
    sockets and the three system calls underneath.

Threads: one that listens, and per peer at most one that sends and one that receives. The thread that uses a
connection is the one that closes it; others only wake it.
"""

from __future__ import annotations

from ._backend import TcpBackend
from ._options import Options

__all__ = ["Options", "TcpBackend"]
