"""Checks that the ranks of one instance do not contradict each other, once all of them are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from statelink.errors import MismatchError

from ._boxes import Box, slab_box

if TYPE_CHECKING:
    from statelink.state import Axis, Buffer, Component, Inventory, Layout

__all__ = ["Numbered", "check_ranks", "range_of"]

ROWS = 256
"""Boxes that are compared with all others at once. It bounds the memory for the comparison."""


class Numbered:
    """Gives equal layouts the same small number, so that the fields of a layout are compared only once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._equal: dict[Layout, int] = {}

    def __call__(self, layout: Layout) -> int:
        """The number of a layout. It must stay alive for as long as this object is used."""
        number = self._known.get(id(layout))
        if number is None:
            number = self._known[id(layout)] = self._equal.setdefault(layout, len(self._equal))
        return number


class _Holder(NamedTuple):
    inventory: Inventory
    component: Component
    buffer: Buffer


def check_ranks(inventories: Sequence[Inventory], role: str) -> None:
    """Check that no two ranks of an instance contradict each other.

    A rank counts as a replica of another only if both say so. Two ranks may describe the same part of a buffer by
    mistake: with the same ``tp``, with rows without heads, or with pipeline stages that each number layers from 0. They
    would otherwise be taken for replicas, and a reader of one rank's bytes would get the other's.

    Args:
        inventories: All ranks of one instance.
        role: ``prefill`` or ``decode``, for messages.

    Raises:
        MismatchError: Two ranks contradict each other. The error names them, and what both claim.
    """
    if len(inventories) < 2:
        return
    _check_axes(inventories, role)
    numbered = Numbered()
    found: dict[tuple[str, str], list[_Holder]] = {}
    for inventory in inventories:
        for component in inventory.components:
            for buffer in component.buffers:
                if buffer.count:
                    found.setdefault((component.name, buffer.name), []).append(_Holder(inventory, component, buffer))
    known: set[tuple[object, ...]] = set()
    for holders in found.values():
        if len(holders) > 1:
            # Buffers of one geometry on the same ranks are compared once.
            first = holders[0]
            key = (
                first.component.name,
                first.buffer.layer is None,
                *((holder.inventory.rank, numbered(holder.buffer.layout)) for holder in holders),
            )
            if key not in known:
                known.add(key)
                _check_stages(holders, role)
                _check_replicas(holders, role)


def _check_axes(inventories: Sequence[Inventory], role: str) -> None:
    sizes: dict[str, tuple[int, Inventory]] = {}
    places: dict[tuple[tuple[str, int], ...], Inventory] = {}
    for inventory in inventories:
        for name, axis in inventory.axes.items():
            size, other = sizes.setdefault(name, (axis.size, inventory))
            if size != axis.size:
                cause = f"rank {other.rank} says {size}, rank {inventory.rank} says {axis.size}"
                raise _contradiction(inventory, role, f"the ranks disagree about the size of axis {name!r}", cause)
    for inventory in inventories:
        lacking = sorted(sizes.keys() - inventory.axes.keys())
        if lacking:
            size, other = sizes[lacking[0]]
            cause = f"rank {other.rank} is {other.axes[lacking[0]].index} of {size} on it"
            raise _contradiction(inventory, role, f"rank {inventory.rank} does not name axis {lacking[0]!r}", cause)
    if math.prod(size for size, _ in sizes.values()) != len(inventories):
        return
    for inventory in inventories:
        place = tuple((name, inventory.axes[name].index) for name in sorted(sizes))
        twin = places.setdefault(place, inventory)
        if twin is not inventory:
            said = ", ".join(f"{name} {index} of {sizes[name][0]}" for name, index in place)
            cause = f"ranks {twin.rank} and {inventory.rank} are both {said}"
            raise _contradiction(inventory, role, "two ranks have the same place on every axis", cause)


def _contradiction(inventory: Inventory, role: str, what: str, cause: str) -> MismatchError:
    return MismatchError(
        what,
        cause=cause,
        hint="give every rank of an instance its own coordinates in axes",
        code="mismatch.axes",
        **{role: inventory.instance},
    )


def _check_stages(holders: Sequence[_Holder], role: str) -> None:
    """Check that each layer is on one pipeline stage only."""
    if holders[0].buffer.layer is None:
        return
    stages: dict[int, _Holder] = {}
    for holder in holders:
        stage = holder.inventory.axes.get("pp")
        if stage is not None:
            stages.setdefault(stage.index, holder)
    if len(stages) > 1:
        (one, first), (other, second) = list(stages.items())[:2]
        raise MismatchError(
            "two pipeline stages list the same layer",
            cause=f"buffer {first.buffer.name!r} is on rank {first.inventory.rank} (pp {one}) and on rank "
            f"{second.inventory.rank} (pp {other})",
            hint="number layers as the whole model does, on every stage",
            code="mismatch.layers",
            component=first.component.name,
            **{role: first.inventory.instance},
        )


def _check_replicas(holders: Sequence[_Holder], role: str) -> None:
    if all(holder.component.replicated for holder in holders):
        return
    places: dict[Box, list[_Holder]] = {}
    for holder in holders:
        for slab in holder.buffer.layout.slabs:
            places.setdefault(slab_box(holder.buffer.layout, slab), []).append(holder)
    boxes = list(places)
    for a, b in _overlapping(boxes):
        for number, one in enumerate(places[boxes[a]]):
            for other in places[boxes[b]][number + 1 if a == b else 0 :]:
                if not _told_apart(one, other):
                    raise _unsaid(one, other, boxes[a], role)


def _overlapping(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield pairs ``(a, b)``, ``a <= b``, of boxes that overlap."""
    low = np.array([box.start for box in boxes], np.int64)
    high = np.array([box.stop for box in boxes], np.int64)
    for first in range(0, len(boxes), ROWS):
        part = slice(first, first + ROWS)
        shared = np.maximum(low[part, None], low) < np.minimum(high[part, None], high)
        for a, b in np.argwhere(shared.all(axis=2)).tolist():
            if first + a <= b:
                yield first + a, b


def _told_apart(one: _Holder, other: _Holder) -> bool:
    """Whether the ranks say why they hold the same box: other positions, replicas, or fewer heads than ranks."""
    a, b = one.component, other.component
    if one.inventory is other.inventory or a.partition != b.partition or (a.replicated and b.replicated):
        return True
    return a.share is not None and b.share is not None and a.share.size == b.share.size and a.share != b.share


def _unsaid(one: _Holder, other: _Holder, box: Box, role: str) -> MismatchError:
    shares = [f"{_said(holder.component.share)}" for holder in (one, other)]
    said = f"each says that it holds {shares[0]}" if shares[0] == shares[1] else f"they say {shares[0]} and {shares[1]}"
    return MismatchError(
        f"ranks {one.inventory.rank} and {other.inventory.rank} hold the same part of buffer {one.buffer.name!r}, "
        "and do not say that they are replicas",
        cause=f"{range_of(one.buffer.layout, box)}; {said}",
        hint="give each rank its own tp=(rank, width) and heads=, and layers the model's own numbers; "
        "or pass replicated=True where the ranks hold the same bytes",
        code="mismatch.replicas",
        component=one.component.name,
        **{role: one.inventory.instance},
    )


def _said(share: Axis | None) -> str:
    return f"share {share.index} of {share.size}" if share is not None and share.size > 1 else "all of it"


def range_of(layout: Layout, box: Box) -> str:
    """A box in words: each axis that it does not cover completely, or the whole item."""
    axes = [
        (name, n)
        for axis, (name, n) in enumerate(zip(layout.axes, layout.shape, strict=True))
        if axis != layout.position
    ]
    parts = [
        f"{name} [{a}, {b})" for (name, n), a, b in zip(axes, box.start, box.stop, strict=True) if (a, b) != (0, n)
    ]
    return ", ".join(parts) or "all of each item"
