"""Hooks for pluggy, and the report of a room. Any installed package may add, replace or observe something with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import pluggy

from statelink.errors import Reason

if TYPE_CHECKING:
    from typing import Any

    from statelink.state import StateType

    from ._strategy import Strategy

__all__ = ["Moved", "RoomReport", "hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("statelink")
hookimpl = pluggy.HookimplMarker("statelink")


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


@hookspec(firstresult=True)
def statelink_strategy(backend: str, state_type: str) -> Strategy | None:
    """Return the strategy for ``state_type`` over ``backend``, or ``None`` to leave the choice to the backend.

    Called once for each state type when a link opens. It comes before the backend's own table.
    """
    return None


@hookspec
def statelink_state_types() -> Sequence[StateType]:
    """Return state types that are to be registered before any link opens."""
    return ()


@hookspec
def statelink_room_ended(report: RoomReport) -> None:
    """Called when a room has succeeded or failed on this side.

    Runs on the link's control thread: return promptly.
    """


@hookspec
def statelink_link_opened(link: Any) -> None:
    """Called with a `statelink.Link` that has just been opened, on the thread that opens it."""


@hookspec
def statelink_link_closed(link: Any) -> None:
    """Called with a `statelink.Link` that was closed, on the thread that closed it."""
