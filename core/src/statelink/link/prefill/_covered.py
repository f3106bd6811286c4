"""Which part of what a destination requires has been pushed to it."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from statelink.errors import RoomError
from statelink.plan import NO_LAYER, ComponentPlan, Due, Move, due

if TYPE_CHECKING:
    from statelink.plan import PairPlan

__all__ = ["Covered"]

MOST_NAMED_LAYERS = 4
"""Layers that a reason names before it counts the rest."""


class Covered:
    """What the pushes of one delivery cover, per component and layer. Belongs to the jobs with the peer's key.

    Args:
        plan: What this rank writes for the destination.
        tokens: N of the request.
        prefix: P of the request.
        peer: The destination's name, for errors.
    """

    def __init__(self, plan: PairPlan, tokens: int, prefix: int, peer: str) -> None:
        self._plan = plan
        self._request = tokens, prefix
        self._peer = peer
        self._dues: dict[str, Due] = {}
        self._whole: set[str] = set()
        """Components whose state the first push brought completely."""
        self._covered: dict[str, npt.NDArray[np.bool_]] = {}
        """Per component, which granules of which layer were pushed: one row for each layer."""

    def owed(self, component: str) -> Due:
        """The part of a component that all pushes together must move."""
        known = self._dues.get(component)
        if known is None:
            plan = self._plan.components[component]
            known = self._dues[component] = due(plan.source, plan.target, *self._request)
        return known

    def add(self, plan: ComponentPlan, piece: Move) -> None:
        """Note which granules of which layers a push covers.

        Raises:
            RoomError: An earlier push covers some of them: the engine's pushes overlap.
        """
        name = piece.component
        owed = self.owed(name)
        first = name not in self._covered and name not in self._whole
        if first and piece.layers is None and isinstance(piece.due, slice) and piece.due == slice(0, len(owed)):
            self._whole.add(name)  # most requests are pushed at once, and need no marks
            return
        covered = self._marks(name, plan, owed)
        rows = slice(None)
        if piece.layers is not None:
            # A plan's layers are in order, so that the layers of a push are neighbours.
            rows = slice(*(bisect_left(plan.layers, each) for each in piece.layers))
        if covered[rows, piece.due].any():
            raise RoomError(
                f"component {name!r} is pushed twice",
                cause=f"{_overlap(owed, plan, piece, covered, rows)} in an earlier push",
                component=name,
                code="room.overlap",
            )
        covered[rows, piece.due] = True

    def _marks(self, name: str, plan: ComponentPlan, owed: Due) -> npt.NDArray[np.bool_]:
        """The marks of a component's granules and layers that were pushed."""
        if name not in self._covered:
            marks = np.ones if name in self._whole else np.zeros
            self._covered[name] = marks((len(plan.layers), len(owed)), np.bool_)
        return self._covered[name]

    def check_complete(self) -> None:
        """Check that the pushes cover everything that decode requires.

        Raises:
            RoomError: Names the component and the first position or layer that is missing.
        """
        for name, plan in self._plan.components.items():
            owed = self.owed(name)
            covered = self._covered.get(name)
            if not len(owed) or (covered.all() if covered is not None else name in self._whole):
                continue
            holes = np.argwhere(~covered) if covered is not None else np.array([[0, 0]])
            row, column = (int(n) for n in holes[0])
            layer = plan.layers[row]
            granule = owed.first + column if owed.granules is None else int(owed.granules[column])
            where = f"position {granule * plan.granule}" if plan.target.page else "its item"
            raise RoomError(
                f"the last push leaves component {name!r} incomplete",
                cause=f"{where}{f' of layer {layer}' if layer >= 0 else ''} was never pushed",
                hint="push every position that decode requires, for every layer, before or with the last push",
                component=name,
                peer=self._peer,
                code="room.incomplete",
            )


def _overlap(owed: Due, plan: ComponentPlan, piece: Move, covered: npt.NDArray[np.bool_], rows: slice) -> str:
    """What an earlier push covers, as a text: the first range of positions, and the layers."""
    before = covered[rows, piece.due]
    layers = np.array(plan.layers[rows])[np.any(before, axis=1)].tolist()
    known = [layer for layer in layers if layer != NO_LAYER]
    where = (
        f" of layer{'s' if len(known) > 1 else ''} {', '.join(map(str, known[:MOST_NAMED_LAYERS]))}" if known else ""
    )
    where += f" and {len(known) - MOST_NAMED_LAYERS} more" if len(known) > MOST_NAMED_LAYERS else ""
    if not plan.target.page:
        return f"its item{where} was"
    columns = np.arange(len(owed))[piece.due][np.any(before, axis=0)]
    granules = columns + owed.first if owed.granules is None else owed.granules[columns]
    gaps = np.flatnonzero(np.diff(granules) != 1)
    last = int(granules[gaps[0]] if len(gaps) else granules[-1]) + 1
    return f"positions [{int(granules[0]) * plan.granule}, {last * plan.granule}){where} were"
