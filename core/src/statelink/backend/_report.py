"""What the core reports about one room, in the same form for every backend."""

from __future__ import annotations

from typing import Annotated

import msgspec

from statelink.errors import Reason

__all__ = ["Moved", "RoomReport"]


class Moved(msgspec.Struct, frozen=True):
    """How much of one component was moved.

    Attributes:
        nbytes: Payload bytes.
        blocks: Blocks handed to the backend; on decode, as the writers report.
    """

    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    blocks: Annotated[int, msgspec.Meta(ge=0)]

    def __add__(self, other: Moved) -> Moved:
        """Both together."""
        return Moved(self.nbytes + other.nbytes, self.blocks + other.blocks)


class RoomReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one room, as one side saw it.

    Attributes:
        room: The request.
        link: Name of the link.
        role: ``prefill`` or ``decode``.
        backend: Name of the backend.
        transports: For each peer, the transport that carried the bytes, as prefill's backend says; or ``unknown``.
        status: ``succeeded`` or ``failed``.
        reason: Why it failed.
        moved: Per component.
        tokens: N; 0 while this side does not know.
        prefix: P.
        chunks: Pushes that were moved.
        waited: Seconds from the call that opened the room until both sides knew of it.
        transferred: Seconds from then until the room ended.
        ended: When the room ended, in seconds since the epoch; ``None`` while it has not.
    """

    room: int
    role: str
    backend: str
    status: str
    reason: Reason | None
    moved: dict[str, Moved]
    tokens: int
    prefix: int
    chunks: int
    waited: float
    transferred: float
    ended: float | None = None
    transports: dict[str, str] = {}
    link: str = ""
