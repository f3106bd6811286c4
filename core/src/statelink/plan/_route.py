"""Decides which source writes which bytes. Every byte of every destination gets exactly one writer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from statelink.errors import MismatchError
from statelink.state import Buffer, Component, Inventory, Layout, Partition

from ._boxes import Box, cells, intersect, merge_boxes, slab_box

__all__ = ["Assignment", "Share", "route"]


TYPICAL_TOKENS = 4096
"""Length of the request for which the load of replicated sources is balanced."""


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
    """What one source rank writes for one destination rank. Without shares, it writes nothing, and is told so.

    Attributes:
        source: The source's rank.
        target: The destination's rank.
        shares: What it writes.
    """

    source: int
    target: int
    shares: tuple[Share, ...]


class _Cell(NamedTuple):
    box: Box
    owners: tuple[int, ...]
    optional: bool


class _Holding(NamedTuple):
    rank: int
    layout: Layout
    partition: Partition


def route(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> list[Assignment]:
    """Assign every byte of every destination slab to exactly one source.

    Sources that hold the same box of the same positions share the load. The one that has least to send so far is
    elected, for all buffers of a layer. Sources that hold different positions each write their own. A source from which
    nobody reads gets an assignment without shares, from destination ``rank mod number of destinations``, so that each
    source rank hears of each request.

    Every decode rank computes the same list from the same inventories. Inventories are taken in the order of ranks.

    Raises:
        MismatchError: No source holds some part of a destination's buffer, or a slab has gaps.
    """
    routes: dict[tuple[int, int], dict[tuple[str, tuple[Box, ...]], list[str]]] = {}
    cut: dict[tuple[object, ...], list[list[_Cell]]] = {}
    merged: dict[tuple[tuple[object, ...], tuple[int, ...]], dict[int, tuple[Box, ...]]] = {}
    election = _Election()
    sources = sorted(sources, key=lambda inventory: inventory.rank)
    targets = sorted(targets, key=lambda inventory: inventory.rank)
    holders = _holders(sources)
    for target in targets:
        for component in target.components:
            for buffer in component.buffers:
                held = holders.get((component.name, buffer.name), [])
                if not buffer.count or (not held and (buffer.optional or component.kind.elide_empty)):
                    continue
                # Buffers of one geometry that the same ranks hold are cut in the same way.
                key = (buffer.layout, component.partition, *held)
                owned = cut.get(key)
                if owned is None:
                    owned = cut[key] = [
                        _owners(buffer.layout, sharing) for sharing in _sharings(target, component, buffer, held)
                    ]
                elected = election.elect(target.rank, component, buffer, itertools.chain.from_iterable(owned))
                # If they also elect the same writers, their boxes are merged in the same way.
                chosen = merged.get((key, elected))
                if chosen is None:
                    chosen = merged[key, elected] = _boxes_by_writer(target, component, buffer, owned, elected)
                for writer, boxes in chosen.items():
                    shares = routes.setdefault((writer, target.rank), {})
                    shares.setdefault((component.name, boxes), []).append(buffer.name)
    for source in sources:
        if not any(reader == source.rank for reader, _ in routes):
            routes[source.rank, targets[source.rank % len(targets)].rank] = {}
    return [
        Assignment(s, t, tuple(Share(name, tuple(buffers), boxes) for (name, boxes), buffers in shares.items()))
        for (s, t), shares in sorted(routes.items())
    ]


class _Election:
    """Elects one of several holders to write a cell. It is deterministic: every decode rank elects the same."""

    def __init__(self) -> None:
        self._load: Counter[int] = Counter()
        self._before: dict[tuple[int, str, int | str, tuple[int, ...]], int] = {}

    def elect(self, target: int, component: Component, buffer: Buffer, owned: Iterable[_Cell]) -> tuple[int, ...]:
        """A writer for each cell; -1 if nobody holds it."""
        # All buffers of a layer have the same writer, so that neighbours in memory can move as one block.
        which = buffer.name if buffer.layer is None else buffer.layer
        # Bytes of a request of this length, because a cell has no position axis.
        rows = 1 if not component.page else TYPICAL_TOKENS // (component.ratio(buffer) or component.page)
        writers = []
        for cell in owned:
            owners = cell.owners
            if len(owners) < 2:
                writers.append(owners[0] if owners else -1)
                continue
            key = (target, component.name, which, owners)
            writer = self._before.get(key)
            if writer is None:
                first = target % len(owners)
                turns = owners[first:] + owners[:first]
                writer = self._before[key] = min(turns, key=lambda owner: self._load[owner])
            self._load[writer] += cell.box.volume * buffer.layout.itemsize * max(rows, 1)
            writers.append(writer)
        return tuple(writers)


def _boxes_by_writer(
    target: Inventory, component: Component, buffer: Buffer, owned: list[list[_Cell]], elected: tuple[int, ...]
) -> dict[int, tuple[Box, ...]]:
    """The boxes that each elected writer writes. Refuses a cell that nobody holds."""
    chosen: dict[int, list[Box]] = {}
    for cell, writer in zip(itertools.chain.from_iterable(owned), elected, strict=True):
        if writer >= 0:
            chosen.setdefault(writer, []).append(cell.box)
        elif not cell.optional:
            raise _unheld(target, component.name, buffer, cell.box)
    return {writer: merge_boxes(boxes) for writer, boxes in chosen.items()}


def _holders(sources: Sequence[Inventory]) -> dict[tuple[str, str], list[_Holding]]:
    found: dict[tuple[str, str], list[_Holding]] = {}
    for source in sources:
        for component in source.components:
            for buffer in component.buffers:
                if buffer.count:
                    holder = _Holding(source.rank, buffer.layout, component.partition)
                    found.setdefault((component.name, buffer.name), []).append(holder)
    return found


def _sharings(
    target: Inventory, component: Component, buffer: Buffer, held: Sequence[_Holding]
) -> list[Sequence[_Holding]]:
    """Groups of holders with the same positions.

    Each group must hold the whole box, because no other has its positions.

    Raises:
        MismatchError: Nobody holds some positions, or positions are dealt out in two ways at once.
    """
    found: dict[Partition, list[_Holding]] = {}
    for holder in held:
        found.setdefault(holder.partition, []).append(holder)
    if Partition() in found:
        return [found[Partition()]]
    ways = {(partition.kind, partition.size, partition.block) for partition in found}
    if len(ways) > 1:
        raise _spread(target, component, buffer, f"prefill spreads its positions in {len(ways)} ways")
    if not found:
        return [held]
    ours = component.partition
    kind, size, block = ways.pop()
    # If both sides deal positions out in the same way, each destination has one counterpart.
    alike = kind == "cyclic" and (ours.kind, ours.size, ours.block) == (kind, size, block)
    indices = [ours.index] if alike else list(range(size))
    missing = [index for index in indices if Partition(kind, size, index, block) not in found]
    if missing:
        raise _spread(target, component, buffer, f"nobody holds share {missing[0]} of {size} of its positions")
    return [found[Partition(kind, size, index, block)] for index in indices]


def _owners(target: Layout, held: Sequence[_Holding]) -> list[_Cell]:
    """The cells of the destination's slabs, each with the ranks that hold it, in the order of ranks."""
    for layout in (target, *(holder.layout for holder in held)):
        if any(slab.stepped for slab in layout.slabs):
            raise MismatchError(
                "slabs with gaps between their coordinates cannot be routed",
                hint="describe positions that are dealt out over ranks by the component's partition",
                code="mismatch.step",
            )
    boxes = [(holder.rank, slab_box(holder.layout, slab)) for holder in held for slab in holder.layout.slabs]
    return [
        _Cell(cell, tuple(sorted({rank for rank, box in boxes if intersect(cell, box) == cell})), slab.optional)
        for slab in target.slabs
        for cell in cells(slab_box(target, slab), (box for _, box in boxes))
    ]


def _spread(target: Inventory, component: Component, buffer: Buffer, cause: str) -> MismatchError:
    return MismatchError(
        f"the positions of buffer {buffer.name!r} cannot be put together",
        cause=cause,
        hint="every prefill rank that holds a share of the positions must be present",
        code="mismatch.partition",
        component=component.name,
        decode=target.instance,
        rank=target.rank,
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
