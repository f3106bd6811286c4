"""How peers and rooms live. Owns the threads; the only place that knows the protocol."""

from __future__ import annotations

from ._inspect import ask, sockets
from ._link import Link
from ._node import Node
from ._place import Place
from ._process import this_process
from ._receiving import Receiving
from ._rendezvous import Peer, Rendezvous, StaticRendezvous
from ._room import Ready, Room
from ._sending import Sending
from ._status import Status
from ._verify import check_verify

__all__ = [
    "Link",
    "Node",
    "Peer",
    "Place",
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
