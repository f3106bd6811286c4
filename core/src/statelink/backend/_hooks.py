"""pluggy hook specifications: what any installed package may add, replace or observe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from statelink.state import StateType

    from ._report import RoomReport
    from ._strategy import Strategy

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("statelink")
hookimpl = pluggy.HookimplMarker("statelink")


@hookspec(firstresult=True)
def statelink_strategy(backend: str, state_type: str) -> Strategy | None:
    """Replace one cell of one backend's table: the strategy for ``state_type`` over ``backend``, or ``None``.

    Asked once per state type when a link opens, before the backend's own table.
    """
    return None


@hookspec
def statelink_state_types() -> Sequence[StateType]:
    """State types to register before any link opens."""
    return ()


@hookspec
def statelink_room_ended(report: RoomReport) -> None:
    """A room ended, on this side, in success or failure. Called on the link's control thread: return promptly."""
