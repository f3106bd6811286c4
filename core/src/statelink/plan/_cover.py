"""Checks that decode's ranks together hold everything that prefill's ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from statelink.errors import MismatchError

from ._boxes import Box, cells, intersect, slab_box
from ._ranks import Numbered, range_of

if TYPE_CHECKING:
    from statelink.state import Buffer, Inventory, Partition

__all__ = ["check_cover"]


class _Held(NamedTuple):
    inventory: Inventory
    buffer: Buffer
    partition: Partition


def check_cover(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> None:
    """Check that every part of what prefill holds has a place on decode.

    `route` finds bytes that decode wants and nobody holds. This function finds bytes that prefill holds and no decode
    rank wants. Without it they would be lost silently, for example if a decode rank is missing, or describes another
    rank's part. It checks this: for every buffer that both sides hold, the boxes of decode's ranks together contain
    those of prefill's ranks. The ranks that hold a box have all shares of its positions. A decode rank that lists some
    buffers of a layer lists all of them.

    Args:
        sources: All ranks of the prefill instance.
        targets: All ranks of the decode instance.

    Raises:
        MismatchError: Names the buffer and the part that no decode rank holds (``mismatch.uncovered``).
    """
    theirs, ours = _holders(sources), _holders(targets)
    _check_layers(sources, targets)
    numbered = Numbered()
    known: set[tuple[object, ...]] = set()
    for name, held in theirs.items():
        here = ours.get(name)
        if here is None:
            continue  # optional: `match` has compared the names
        key = tuple(tuple((numbered(each.buffer.layout), each.partition) for each in side) for side in (held, here))
        if key not in known:
            known.add(key)
            _check_buffer(name[0], held, here)


def _holders(inventories: Sequence[Inventory]) -> dict[tuple[str, str], list[_Held]]:
    found: dict[tuple[str, str], list[_Held]] = {}
    for inventory in inventories:
        for component in inventory.components:
            for buffer in component.buffers:
                if buffer.count:
                    held = _Held(inventory, buffer, component.partition)
                    found.setdefault((component.name, buffer.name), []).append(held)
    return found


def _check_buffer(component: str, sources: Sequence[_Held], targets: Sequence[_Held]) -> None:
    wanted = {
        slab_box(each.buffer.layout, slab): each
        for each in sources
        for slab in each.buffer.layout.slabs
        if not slab.optional
    }
    shares = {each.partition for each in sources}
    there: dict[Box, set[Partition]] = {}
    for each in targets:
        for slab in each.buffer.layout.slabs:
            there.setdefault(slab_box(each.buffer.layout, slab), set()).add(each.partition)
    for box, source in wanted.items():
        if box in there and _missing(shares, there[box]) == "":
            continue
        for cell in cells(box, there):
            held: set[Partition] = set()
            for other, partitions in there.items():
                if intersect(cell, other) == cell:
                    held |= partitions
            missing = _missing(shares, held)
            if missing:
                part = range_of(source.buffer.layout, cell)
                raise _uncovered(
                    f"no decode rank holds a part of buffer {source.buffer.name!r}",
                    f"{part}{missing}; prefill rank {source.inventory.rank} holds it",
                    component,
                    source.inventory,
                    targets[0].inventory,
                )


def _missing(wanted: Iterable[Partition], held: set[Partition]) -> str:
    """The share of the positions that is missing, in words; empty if none is."""
    if not held:
        return ", at any position"
    ways: dict[tuple[str, int, int], set[int]] = {}
    for each in held:
        ways.setdefault((each.kind, each.size, each.block), set()).add(each.index)
    if any(len(indices) == size for (_, size, _), indices in ways.items()) or set(wanted) <= held:
        return ""
    (_, size, _), indices = min(ways.items())
    return f", share {min(set(range(size)) - indices)} of {size} of its positions"


def _check_layers(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> None:
    """Refuse a rank with a part of a layer. Pipeline stages hold whole layers, so the rest of that layer is lost."""
    layers: dict[tuple[str, int, bool], set[str]] = {}
    groups: dict[tuple[str, str], set[str]] = {}
    for inventory in sources:
        for component in inventory.components:
            for buffer in component.buffers:
                if buffer.layer is not None:
                    # Buffers that decode may lack are compared among themselves.
                    group = layers.setdefault((component.name, buffer.layer, buffer.optional), set())
                    group.add(buffer.name)
                    groups[component.name, buffer.name] = group
    for inventory in targets:
        for component in inventory.components:
            names = {buffer.name for buffer in component.buffers}
            for name in names:
                missing = groups.get((component.name, name), names) - names
                if missing:
                    raise _uncovered(
                        f"decode rank {inventory.rank} lacks buffer {min(missing)!r}",
                        f"it has {name!r} of the same layer, and prefill has both",
                        component.name,
                        sources[0],
                        inventory,
                    )


def _uncovered(what: str, cause: str, component: str, source: Inventory, target: Inventory) -> MismatchError:
    return MismatchError(
        what,
        cause=cause,
        hint="every decode rank must be present, and describe its own share: tp=(rank, width), the index of its "
        "partition, and every buffer of its layers",
        code="mismatch.uncovered",
        component=component,
        prefill=source.instance,
        decode=target.instance,
    )
