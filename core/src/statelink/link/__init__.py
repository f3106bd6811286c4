"""The protocol between links: their peers and their rooms. No other package knows it.

The engine calls `Link`, which opens a room in one of the link's roles. `prefill` has the rooms that send, `decode` has
the rooms that receive, and neither package knows the other. Both build on `RoomTable` (the ids, the queue of changes
and the push budget), `RoomState` (what both kinds of rooms have in common), `Context` (what is fixed when the link
opens), `peers` (handshakes, connections and the states of peers) and `runtime` (the threads, and which there are).

The engine's threads hold handles (`Room`, `Sending`, `Receiving`). A handle checks a call on the engine's thread, and
posts a job to the control thread. The control thread alone changes a room, except that the call which names memory
marks the room as not quiesced. The docstring of each package says which thread owns which state, and what wakes it.
"""

from __future__ import annotations

from ._context import Context
from ._exits import opening
from ._inspect import ask, sockets
from ._link import Link
from ._ready import Ready
from ._room import Room
from ._status import Status
from ._verify import check_hash, check_verify
from .decode import LANDING_ROUND_SECONDS, Receiving
from .peers import Peer, Rendezvous, StaticRendezvous, this_process
from .prefill import Sending, Wanted

__all__ = [
    "LANDING_ROUND_SECONDS",
    "Context",
    "Link",
    "Peer",
    "Ready",
    "Receiving",
    "Rendezvous",
    "Room",
    "Sending",
    "StaticRendezvous",
    "Status",
    "Wanted",
    "ask",
    "check_hash",
    "check_verify",
    "opening",
    "sockets",
    "this_process",
]
