"""The largest size of each kind of message. Decoding takes time and memory, and the sender chooses the size."""

from __future__ import annotations

from statelink.backend import MAX_DESCRIPTOR

from ._messages import (
    MAX_INDICES,
    Attach,
    Chunk,
    Failed,
    Finished,
    Hello,
    Message,
    Note,
    Refuse,
    Request,
    Welcome,
)
from ._rendezvous import Browsed, Resolved

__all__ = ["MAX_FRAME", "MAX_HANDSHAKE", "MAX_INVENTORY", "SMALL_MESSAGE_BYTES", "limit_of"]

MAX_FRAME = 256 << 10
"""Most bytes of one frame. ZeroMQ disconnects a peer that sends a larger one. Larger messages are sent in parts."""
SMALL_MESSAGE_BYTES = 16 << 10
"""Most bytes of a message without a list. A peer that has not introduced itself may send only `Hello` beyond this."""
MAX_INVENTORY = 4 << 20
"""Most bytes of an encoded inventory."""
MAX_HANDSHAKE = MAX_INVENTORY + MAX_DESCRIPTOR + (1 << 20)
"""Most bytes of an encoded handshake."""

_LIMITS: dict[type[Message], int] = {
    Hello: MAX_HANDSHAKE + SMALL_MESSAGE_BYTES,
    Welcome: MAX_HANDSHAKE + SMALL_MESSAGE_BYTES,
    Attach: 2 * MAX_INVENTORY,  # it names at most as many buffers as an inventory has
    Request: 8 * MAX_INDICES + (4 << 20),
    # A line for each component, or a reason at its longest.
    Chunk: 2 << 20,
    Finished: 2 << 20,
    Failed: 2 << 20,
    Refuse: 2 << 20,
    Note: 128 << 10,
    Resolved: 8 << 20,
    Browsed: 8 << 20,  # names may be longer in bytes than in characters
}


def limit_of(kind: type[Message]) -> int:
    """Most bytes of the body of a message of a kind."""
    return _LIMITS.get(kind, SMALL_MESSAGE_BYTES)
