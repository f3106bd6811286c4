"""Typed, versioned, bounded messages between links, and the authenticated channel that carries them."""

from __future__ import annotations

from ._channel import Channel
from ._codec import MAX_FRAME, decode, encode, pack_items, unpack_items
from ._messages import (
    KINDS,
    PROTOCOL,
    Accepted,
    Attach,
    Attached,
    Bye,
    Card,
    Chunk,
    Drained,
    Failed,
    Finished,
    Hello,
    ItemList,
    Message,
    Note,
    Ping,
    Pong,
    Refuse,
    Request,
    Unknown,
    Welcome,
)
from ._security import Endpoint, Keys, is_loopback, parse_endpoint

__all__ = [
    "KINDS",
    "MAX_FRAME",
    "PROTOCOL",
    "Accepted",
    "Attach",
    "Attached",
    "Bye",
    "Card",
    "Channel",
    "Chunk",
    "Drained",
    "Endpoint",
    "Failed",
    "Finished",
    "Hello",
    "ItemList",
    "Keys",
    "Message",
    "Note",
    "Ping",
    "Pong",
    "Refuse",
    "Request",
    "Unknown",
    "Welcome",
    "decode",
    "encode",
    "is_loopback",
    "pack_items",
    "parse_endpoint",
    "unpack_items",
]
