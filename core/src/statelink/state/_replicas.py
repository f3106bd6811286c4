"""Checks that each component of a rank says how the ranks of its instance share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from statelink.errors import StateError

if TYPE_CHECKING:
    from ._inventory import Axis, Component

__all__ = ["check_shares"]


def check_shares(components: Sequence[Component], tp: Axis | None) -> None:
    """Check that every component of a TP rank says which part of the model's state it holds.

    The width of TP is that of the axis ``tp``, or the largest width that a component states. Items without heads on
    such a rank are the same on every rank, or the engine forgot to say which heads they hold. In the second case, ranks
    would count as replicas, and a reader of one rank's bytes would get another's. So the engine has to say it.

    Args:
        components: The components of one rank.
        tp: Its coordinate on the axis ``tp``, if it has one.

    Raises:
        StateError: A component does not say it, or contradicts the axis or another component. The error names it.
    """
    width, by = (tp.size, "the axis 'tp'") if tp is not None else (1, "")
    indices: dict[int, Component] = {}
    """For each width, the first component of that width."""
    for component in components:
        share = component.share
        if share is None or share.size == 1:
            continue
        other = indices.setdefault(share.size, component)
        if other.share is not None and other.share.index != share.index:
            raise StateError(
                f"components {other.name!r} and {component.name!r} are of different TP ranks",
                cause=f"one holds share {other.share.index} of {share.size}, the other share {share.index}",
                hint="pass the same tp=(rank, width) to the constructors of one rank",
            )
        if tp is not None and share.size == tp.size and share.index != tp.index:
            raise StateError(
                f"component {component.name!r} and the axis 'tp' contradict each other",
                cause=f"it holds share {share.index} of {share.size}; the rank is {tp.index} of {tp.size}",
                hint="pass the same rank and width to the constructor and to axes",
            )
        if share.size > width:
            width, by = share.size, f"component {component.name!r}"
    if width == 1:
        return
    for component in components:
        if component.share is None and not component.replicated and _holds_all(component):
            raise StateError(
                f"component {component.name!r} does not say how the TP ranks share it",
                cause=f"its items have no heads, and {by} says that this is one of {width} TP ranks",
                hint="pass replicated=True where every TP rank lists the same bytes; where each holds heads of its "
                "own, heads= and tp=(rank, width), or describe its part of each item by slabs",
            )


def _holds_all(component: Component) -> bool:
    """Whether every item is here as a whole, so that no other rank can have another part of it."""
    held = [buffer.layout.whole for buffer in component.buffers if buffer.count]
    return bool(held) and all(held)
