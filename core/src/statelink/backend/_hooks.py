"""Hooks for pluggy. Any installed package may implement them to add, replace or observe something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from typing import Any

    from statelink.state import StateType

    from ._report import RoomReport
    from ._strategy import Strategy

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("statelink")
hookimpl = pluggy.HookimplMarker("statelink")


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
