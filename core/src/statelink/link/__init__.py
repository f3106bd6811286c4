"""How peers and rooms live. The only place that knows the protocol.

`Link` is what the engine calls; it opens a room in one of its two roles. `prefill` has the rooms that send, `decode`
has the rooms that receive, and neither knows the other. Below them, `RoomTable` owns the ids, the queue of changes and
the push budget; `RoomState` is what both kinds of rooms have in common; `Context` is what was fixed when the link
opened; `peers` knows who the other links are; `runtime` owns the threads, and says which there are.

The engine's threads see handles (`Room`, `Sending`, `Receiving`). They read what the control thread wrote, and post
jobs to it; only the control thread changes a room. Each package says at its top which thread owns which state, and what
wakes it.
"""

from __future__ import annotations

from ._context import Context
from ._handle import Room
from ._inspect import ask, sockets
from ._link import Link
from ._room import Ready
from ._status import Status
from ._verify import check_verify
from .decode import LANDING_ROUND, Receiving
from .peers import Peer, Rendezvous, StaticRendezvous, this_process
from .prefill import Sending

__all__ = [
    "LANDING_ROUND",
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
    "ask",
    "check_verify",
    "sockets",
    "this_process",
]
