"""What a link knows of its peers apart from rooms: their handshakes, their connections, and whether they are alive.

The roles keep the peers themselves: `prefill` keeps decode ranks, `decode` keeps prefill instances. This package has
what both use. It has no thread and no timer: the roles call it. The control thread owns the states of peers, and the
list of the connections that are wanted (`Connections`). Data threads read large handshakes (`HandshakeReader`), make
and end connections of the backend, and ask the rendezvous.
"""

from __future__ import annotations

from ._connections import (
    Carrier,
    Connection,
    Connections,
    check_transport,
    known_transport,
    tells_transport,
    transport_of,
)
from ._handshake import MAX_WAITING, HandshakeReader, HeldHellos, can_receive, can_send, check_peer, is_sibling
from ._process import Witness, this_process
from ._rendezvous import Explaining, Naming, Peer, Rendezvous, StaticRendezvous, find_siblings
from ._states import DECODE_RANK, INSTANCE, InstanceEvent, InstanceState, RankEvent, RankState

__all__ = [
    "DECODE_RANK",
    "INSTANCE",
    "MAX_WAITING",
    "Carrier",
    "Connection",
    "Connections",
    "Explaining",
    "HandshakeReader",
    "HeldHellos",
    "InstanceEvent",
    "InstanceState",
    "Naming",
    "Peer",
    "RankEvent",
    "RankState",
    "Rendezvous",
    "StaticRendezvous",
    "Witness",
    "can_receive",
    "can_send",
    "check_peer",
    "check_transport",
    "find_siblings",
    "is_sibling",
    "known_transport",
    "tells_transport",
    "this_process",
    "transport_of",
]
