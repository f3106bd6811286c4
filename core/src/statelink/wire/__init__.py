"""Typed, versioned, bounded messages between links, and the authenticated channel that carries them."""

from __future__ import annotations

from ._channel import Channel
from ._codec import MAX_EFFORT, decode, encode, pack_items, read_handshake, unpack_items, write_handshake
from ._descriptors import check_descriptors, no_descriptors
from ._dialling import Trouble
from ._keys import ENVIRONMENT, Keys, check_private, read_secret
from ._limits import MAX_FRAME, MAX_HANDSHAKE, MAX_INVENTORY, limit_of
from ._messages import (
    KINDS,
    MAX_INDICES,
    MAX_UNMET,
    PROTOCOL,
    Accepted,
    Attach,
    Attached,
    Bye,
    Chunk,
    Drained,
    Failed,
    Finished,
    Handshake,
    Hello,
    ItemList,
    Message,
    Note,
    Ping,
    Pong,
    ProcessId,
    Refuse,
    Request,
    Unknown,
    Unmet,
    Welcome,
)
from ._rendezvous import MAX_RANKS, RENDEZVOUS_KINDS, Register, Registered, Resolve, Resolved
from ._security import Endpoint, host_of, is_loopback, parse_endpoint

__all__ = [
    "ENVIRONMENT",
    "KINDS",
    "MAX_EFFORT",
    "MAX_FRAME",
    "MAX_HANDSHAKE",
    "MAX_INDICES",
    "MAX_INVENTORY",
    "MAX_RANKS",
    "MAX_UNMET",
    "PROTOCOL",
    "RENDEZVOUS_KINDS",
    "Accepted",
    "Attach",
    "Attached",
    "Bye",
    "Channel",
    "Chunk",
    "Drained",
    "Endpoint",
    "Failed",
    "Finished",
    "Handshake",
    "Hello",
    "ItemList",
    "Keys",
    "Message",
    "Note",
    "Ping",
    "Pong",
    "ProcessId",
    "Refuse",
    "Register",
    "Registered",
    "Request",
    "Resolve",
    "Resolved",
    "Trouble",
    "Unknown",
    "Unmet",
    "Welcome",
    "check_descriptors",
    "check_private",
    "decode",
    "encode",
    "host_of",
    "is_loopback",
    "limit_of",
    "no_descriptors",
    "pack_items",
    "parse_endpoint",
    "read_handshake",
    "read_secret",
    "unpack_items",
<<<<<<< HEAD
    "unpack_list_of_buffers",
    "write_handshake",
=======
    "write_card",
>>>>>>> 4da3fae (Delete the codecs for lists that no message uses)
]
