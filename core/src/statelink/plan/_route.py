"""Who sends what to whom: every byte of every destination gets exactly one writer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from statelink.errors import MismatchError
from statelink.state import Buffer, Inventory, Layout

from ._boxes import Box, cells, intersect, merge_boxes, slab_box

__all__ = ["Assignment", "Share", "route"]


class Share(msgspec.Struct, frozen=True):
    """The boxes that one source writes of some buffers of one component.

    Attributes:
        component: Name of the component.
        buffers: Names of the buffers, all with the same boxes.
        boxes: Global coordinates, without the position axis.
    """

    component: str
    buffers: tuple[str, ...]
    boxes: tuple[Box, ...]


class Assignment(msgspec.Struct, frozen=True):
    """What one source rank writes into one destination rank. No shares: it has no part, and is told so.

    Attributes:
        source: The source's rank.
        target: The destination's rank.
        shares: What it writes.
    """

    source: int
    target: int
    shares: tuple[Share, ...]


Holder = tuple[int, Layout]


def route(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> list[Assignment]:
    """Assign every byte of every destination slab to exactly one source.

    Sources that hold the same box share the load: the election rotates by destination and by buffer. A source that
    nobody reads from still gets an assignment, without shares, from destination ``rank mod number of destinations``,
    so that each source rank hears of each request.

    Every decode rank computes the same list from the same inventories. Inventories are taken in order of rank.

    Raises:
        MismatchError: No source holds some part of a destination's buffer, or a slab has gaps.
    """
    routes: dict[tuple[int, int], dict[tuple[str, tuple[Box, ...]], list[str]]] = {}
    cut: dict[tuple[object, ...], list[tuple[Box, list[int]]]] = {}
    sources = sorted(sources, key=lambda inventory: inventory.rank)
    targets = sorted(targets, key=lambda inventory: inventory.rank)
    holders = _holders(sources)
    for target in targets:
        for component in target.components:
            _check_partition(component.name, component.partition.kind, target)
            for number, buffer in enumerate(component.buffers):
                held = holders.get((component.name, buffer.name), [])
                if not buffer.count or (not held and _may_stay(buffer, component.kind.elide_empty)):
                    continue
                # Buffers of one geometry, held by the same ranks, are cut alike.
                key = (buffer.layout, *held)
                owned = cut.get(key)
                if owned is None:
                    owned = cut[key] = _owners(buffer.layout, held)
                chosen: dict[int, list[Box]] = {}
                for cell, owners in owned:
                    if not owners:
                        raise _unheld(target, component.name, buffer, cell)
                    chosen.setdefault(owners[(target.rank + number) % len(owners)], []).append(cell)
                for writer, boxes in chosen.items():
                    shares = routes.setdefault((writer, target.rank), {})
                    shares.setdefault((component.name, merge_boxes(boxes)), []).append(buffer.name)
    for source in sources:
        if not any(reader == source.rank for reader, _ in routes):
            routes[source.rank, targets[source.rank % len(targets)].rank] = {}
    return [
        Assignment(s, t, tuple(Share(name, tuple(buffers), boxes) for (name, boxes), buffers in shares.items()))
        for (s, t), shares in sorted(routes.items())
    ]


def _holders(sources: Sequence[Inventory]) -> dict[tuple[str, str], list[Holder]]:
    found: dict[tuple[str, str], list[Holder]] = {}
    for source in sources:
        for component in source.components:
            _check_partition(component.name, component.partition.kind, source)
            for buffer in component.buffers:
                if buffer.count:
                    found.setdefault((component.name, buffer.name), []).append((source.rank, buffer.layout))
    return found


def _owners(target: Layout, held: Sequence[Holder]) -> list[tuple[Box, list[int]]]:
    """Cells of what the destination holds, each with the ranks that hold it, in order of rank."""
    boxes = [(rank, slab_box(layout, slab)) for rank, layout in held for slab in layout.slabs]
    owned = [
        (cell, sorted({rank for rank, box in boxes if intersect(cell, box) == cell}))
        for slab in target.slabs
        for cell in cells(slab_box(target, slab), (box for _, box in boxes))
    ]
    for layout in (target, *(layout for _, layout in held)):
        if any(slab.stepped for slab in layout.slabs):
            raise MismatchError(
                "slabs with gaps between their coordinates cannot be routed",
                hint="describe positions that are dealt out over ranks by the component's partition",
                code="mismatch.step",
            )
    return owned


def _may_stay(buffer: Buffer, elide: bool) -> bool:
    return buffer.optional or elide


def _check_partition(component: str, kind: str, inventory: Inventory) -> None:
    if kind != "all":
        raise MismatchError(
            f"positions of component {component!r} are partitioned as {kind!r}",
            cause="this version plans components whose ranks hold all positions",
            instance=inventory.instance,
            rank=inventory.rank,
            code="mismatch.partition",
        )


def _unheld(target: Inventory, component: str, buffer: Buffer, cell: Box) -> MismatchError:
    layout = buffer.layout
    axes = [name for axis, name in enumerate(layout.axes) if axis != layout.position]
    part = ", ".join(f"{name} [{a}, {b})" for name, a, b in zip(axes, cell.start, cell.stop, strict=True))
    return MismatchError(
        f"no source holds a part of buffer {buffer.name!r}",
        cause=f"{part} is held by no prefill rank",
        hint="every rank of the prefill instance must be present, and describe what it holds in global coordinates",
        code="mismatch.unheld",
        component=component,
        decode=target.instance,
        rank=target.rank,
    )
