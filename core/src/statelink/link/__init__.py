"""How peers and rooms live. Owns the threads; the only place that knows the protocol."""

from __future__ import annotations

from ._config import LinkConfig, Staging, read_options
from ._inspect import ask, sockets
from ._link import Link
from ._node import Node
from ._place import Place
from ._process import this_process
from ._receiving import Receiving
from ._rendezvous import Peer, Rendezvous, StaticRendezvous
from ._room import Ready, Room
from ._sending import Sending
from ._source import Given, read_config
from ._status import Status
from ._verify import check_verify

__all__ = [
    "Given",
    "Link",
    "LinkConfig",
    "Node",
    "Peer",
    "Place",
    "Ready",
    "Receiving",
    "Rendezvous",
    "Room",
    "Sending",
    "Staging",
    "StaticRendezvous",
    "Status",
    "ask",
    "check_verify",
    "read_config",
    "read_options",
    "sockets",
    "this_process",
]
