"""Compiles two inventories and an assignment into tables. A request then only adds its indices.

Buffers that lie in one item on both sides are joined, so that what is adjacent there moves as one block. A page may
hold the keys and values of a layer in turns, or all layers one after the other. Its buffers are described one by one,
as if they were arrays of their own. If both sides have them in one item, one index brings all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.errors import MismatchError, StateError

from ._boxes import Box, Runs, runs_of
from ._component_plan import NO_LAYER, ComponentPlan, Group
from ._positions import granule_of
from ._state_bytes import StateParts
from ._whole import Shapes

if TYPE_CHECKING:
    from statelink.state import Buffer, Component, Inventory

    from ._route import Assignment, Share

__all__ = ["PairPlan", "compile_pair"]


class BufferPair(NamedTuple):
    """A buffer on both sides, and what moves of one granule of it.

    Attributes:
        source: The source's buffer.
        target: The destination's buffer.
        runs: The runs of a granule. Pairs of one geometry share one object.
        boxes: What the source writes.
    """

    source: Buffer
    target: Buffer
    runs: Runs
    boxes: tuple[Box, ...]


def join(pairs: Sequence[BufferPair], most: int, *, by_layer: bool = False) -> list[BufferPair]:
    """Join the buffers that lie in one item of one region on both sides.

    A joined pair has the runs of all its members, and no boxes. It has a layer if all members have the same one. Where
    nothing can be joined, the pairs stay as they were.

    Args:
        pairs: All buffers of a component.
        most: Most runs in all tables that are made. Buffers that would need more are not joined.
        by_layer: Whether only buffers of one layer are joined.
    """
    places: dict[tuple[int | None, ...], list[BufferPair]] = {}
    for pair in pairs:
        layer = (pair.target.layer,) if by_layer else ()
        key = (pair.source.region, pair.source.stride, pair.target.region, pair.target.stride, *layer)
        places.setdefault(key, []).append(pair)
    shared: dict[tuple[tuple[int, int, int], ...], Runs] = {}
    joined = []
    for members in (nest for alike in places.values() for nest in (_nests(alike) if len(alike) > 1 else [alike])):
        if len(members) == 1:
            joined += members
            continue
        (source, target), shifts = _corners(members)
        # Most layers are alike, so that they share the table that was made for the first of them.
        key = tuple((id(pair.runs), *shift) for pair, shift in zip(members, shifts, strict=True))
        if key not in shared:
            count = sum(len(pair.runs.nbytes) for pair in members)
            if count > most:
                joined += members
                continue
            most -= count
            shared[key] = Runs.union([pair.runs.shifted(*shift) for pair, shift in zip(members, shifts, strict=True)])
        joined.append(BufferPair(source, target, shared[key], ()))
    return joined


def _nests(pairs: list[BufferPair]) -> Iterator[list[BufferPair]]:
    """Split buffers of one region and stride on each side into those that lie in one item on both sides."""
    nest: list[BufferPair] = []
    source = target = (0, 0)
    for pair in sorted(pairs, key=lambda pair: (pair.source.offset, pair.target.offset)):
        wider = _around(source, pair.source, not nest), _around(target, pair.target, not nest)
        if nest and (_length(wider[0]) > pair.source.stride or _length(wider[1]) > pair.target.stride):
            yield nest
            nest = []
            wider = _around(source, pair.source, True), _around(target, pair.target, True)
        source, target = wider
        nest.append(pair)
    yield nest


def _around(range_: tuple[int, int], buffer: Buffer, first: bool) -> tuple[int, int]:
    """The range of bytes around a range and the first item of a buffer."""
    low, high = buffer.offset, buffer.offset + buffer.layout.nbytes
    return (low, high) if first else (min(low, range_[0]), max(high, range_[1]))


def _length(range_: tuple[int, int]) -> int:
    return range_[1] - range_[0]


def _corners(members: list[BufferPair]) -> tuple[tuple[Buffer, Buffer], list[tuple[int, int]]]:
    """The first buffer of each side, with the layer that all have in common, and how far the others are behind it."""
    layers = {pair.target.layer for pair in members}
    layer = layers.pop() if len(layers) == 1 else None
    source, target = (
        msgspec.structs.replace(min(buffers, key=lambda buffer: buffer.offset), layer=layer)
        for buffers in ([pair.source for pair in members], [pair.target for pair in members])
    )
    shifts = [(pair.source.offset - source.offset, pair.target.offset - target.offset) for pair in members]
    return (source, target), shifts


U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
MAX_BOXES = 1024
"""Most boxes in one share."""
MAX_PLAN_RUNS = 1 << 21
"""Most runs that one plan may have: those of all its distinct pairs of items together. A run takes 40 bytes."""
MAX_PLAN_COMPARED = 1 << 18
"""Most comparisons of boxes and slabs for one plan."""
OF_A_BOX = 16
"""The cost of comparing a box with all others of its share, in comparisons."""


class PairPlan(NamedTuple):
    """Everything that one source rank writes for one destination rank.

    Immutable but for `shapes`, and safe to share between threads.

    Attributes:
        assignment: What the source has to write.
        components: Component name to its plan. A component that the source does not write is absent.
        digest: 16 bytes. Both sides compute them from both inventories, without addresses, and the assignment.
        shapes: The shapes of small requests that are known. They alone change, and belong to who moves the requests.
    """

    assignment: Assignment
    components: dict[str, ComponentPlan]
    digest: bytes
    shapes: Shapes


def compile_pair(source: Inventory, target: Inventory, assignment: Assignment) -> PairPlan:
    """Check an assignment against both inventories and compile it.

    Raises:
        MismatchError: One side lacks something that the assignment names, or the sides do not fit together.
        StateError: An address does not fit into 64 bits.
    """
    plans: dict[str, list[BufferPair]] = {}
    tables: dict[tuple[int, int, int], Runs] = {}
    cuts: dict[tuple[tuple[Box, ...], int, int], int] = {}
    named: set[tuple[str, str]] = set()
    held: dict[str, tuple[Component, Component, dict[str, Buffer], dict[str, Buffer]]] = {}
    effort = _Effort(source, target)
    for share in assignment.shares:
        if share.component not in held:
            ours, theirs = _component(target, share), _component(source, share)
            here = {buffer.name: buffer for buffer in ours.buffers}
            there = {buffer.name: buffer for buffer in theirs.buffers}
            held[share.component] = ours, theirs, here, there
        ours, theirs, here, there = held[share.component]
        granule = granule_of(theirs, ours)
        checked: set[int] = set()
        # Two components may share layouts and be cut into different granules. So the granule is part of the key.
        cut = cuts.setdefault((share.boxes, granule, theirs.page), len(cuts))
        for name in share.buffers:
            if (share.component, name) in named:
                raise _refused(assignment, share, name, "it is named twice")
            named.add((share.component, name))
            a, b = there.get(name), here.get(name)
            if a is None or b is None or not a.count or not b.count:
                raise _refused(assignment, share, name, "one side does not hold this buffer")
            if id(b.layout) not in checked:
                checked.add(id(b.layout))
                _check_boxes(assignment, share, b)
                effort.compare(OF_A_BOX * len(share.boxes))
            key = (id(a.layout), id(b.layout), cut)
            runs = tables.get(key)
            if runs is None:
                fits = a.layout.axes == b.layout.axes and a.layout.itemsize == b.layout.itemsize
                rows = _rows(assignment, share, theirs, a, granule)
                effort.compare(len(share.boxes) * len(a.layout.slabs) * len(b.layout.slabs))
                made = runs_of(a.layout, b.layout, share.boxes, rows) if fits else None
                if made is None:
                    raise _refused(assignment, share, name, "a box of it is not held by both sides")
                effort.keep(len(made.nbytes))
                runs = tables[key] = made
            plans.setdefault(share.component, []).append(BufferPair(a, b, runs, share.boxes))
    components = {name: _component_plan(source, target, name, pairs) for name, pairs in plans.items()}
    return PairPlan(assignment, components, _digest(source, target, assignment), Shapes())


class _Effort:
    """Bounds the cost of compiling an assignment.

    A peer chooses the assignment and one of the two inventories, so it could make the cost as high as it likes. Each
    method raises `MismatchError` as soon as the cost is above its limit.
    """

    def __init__(self, source: Inventory, target: Inventory) -> None:
        self._who = {"prefill": source.instance, "decode": target.instance}
        self._compared = self._runs = 0

    def compare(self, count: int) -> None:
        """Count comparisons of boxes with each other, or with the slabs of both sides, before they are made."""
        self._compared += count
        self._check("boxes and slabs are compared", self._compared, MAX_PLAN_COMPARED)

    def keep(self, runs: int) -> None:
        """Count a table of runs that was made."""
        self._runs += runs
        self._check("contiguous pieces are what one item of each buffer consists of", self._runs, MAX_PLAN_RUNS)

    def _check(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise MismatchError(
                "the two sides cut each other into too many pieces",
                cause=f"{count} {what}, and at most {most} may be",
                hint="describe what a rank holds in fewer slabs, and pages in the same axis order on both sides",
                **self._who,
            )


def _component_plan(source: Inventory, target: Inventory, name: str, pairs: list[BufferPair]) -> ComponentPlan:
    theirs, ours = source.component(name), target.component(name)
    layer_nbytes: dict[int, int] = {}
    totals = {id(pair.runs): pair.runs.total for pair in {id(pair.runs): pair for pair in pairs}.values()}
    for pair in pairs:
        layer = NO_LAYER if pair.target.layer is None else pair.target.layer
        layer_nbytes[layer] = layer_nbytes.get(layer, 0) + totals[id(pair.runs)]
    groups = _groups(source, target, pairs)
    granule = granule_of(theirs, ours)
    layered, fused = (
        _groups(source, target, joined) if len(joined) < len(pairs) else groups
        for joined in (join(pairs, MAX_PLAN_RUNS, by_layer=True), join(pairs, MAX_PLAN_RUNS))
    )
    granules = max(theirs.page // granule, 1)
    return ComponentPlan(
        source=theirs,
        target=ours,
        granule=granule,
        groups=groups,
        layered=layered,
        fused=fused,
        granule_nbytes=sum(layer_nbytes.values()),
        layer_nbytes=layer_nbytes,
        parts=StateParts(theirs, ours, [(pair.source, pair.target, pair.boxes) for pair in pairs]),
        item_blocks=granules * sum(len(each.source) * len(each.runs.nbytes) for each in fused),
        item_nbytes=granules * sum(layer_nbytes.values()),
    )


def _groups(source: Inventory, target: Inventory, pairs: list[BufferPair]) -> tuple[Group, ...]:
    alike: dict[tuple[int, int, int], list[BufferPair]] = {}
    numbers: dict[tuple[int, int, int], list[int]] = {}
    for number, pair in enumerate(pairs):
        key = id(pair.runs), pair.source.stride, pair.target.stride
        alike.setdefault(key, []).append(pair)
        numbers.setdefault(key, []).append(number)
    return tuple(
        Group(
            runs=members[0].runs,
            source_stride=members[0].source.stride,
            target_stride=members[0].target.stride,
            source=_addresses(source, [pair.source for pair in members]),
            target=_addresses(target, [pair.target for pair in members]),
            source_region=np.array([pair.source.region for pair in members], np.uint32),
            target_region=np.array([pair.target.region for pair in members], np.uint32),
            layers=np.array(
                [NO_LAYER if pair.target.layer is None else pair.target.layer for pair in members], np.int64
            ),
            numbers=np.array(numbers[key], np.int64),
        )
        for key, members in alike.items()
    )


def _addresses(inventory: Inventory, buffers: list[Buffer]) -> U64:
    addresses = [inventory.regions[buffer.region].address + buffer.offset for buffer in buffers]
    if addresses and max(addresses) >= 1 << 64:
        raise StateError("an address does not fit into 64 bits")
    return np.array(addresses, np.uint64)


def _rows(assignment: Assignment, share: Share, component: Component, buffer: Buffer, granule: int) -> int:
    """Number of rows of a granule. It is smaller than the number of positions if a buffer is compressed."""
    ratio = component.ratio(buffer)
    unit = ratio or component.page or 1
    if granule % unit:
        cause = f"{'a row' if ratio else 'an item'} stands for {unit} positions, and they are cut every {granule}"
        raise _refused(assignment, share, buffer.name, cause)
    return granule // unit


def _component(inventory: Inventory, share: Share) -> Component:
    component = inventory.by_name.get(share.component)
    if component is not None:
        return component
    raise MismatchError(
        f"an assignment names component {share.component!r}",
        cause=f"{inventory.instance!r} rank {inventory.rank} does not have it",
        code="mismatch.assignment",
    )


def _refused(assignment: Assignment, share: Share, buffer: str, cause: str) -> MismatchError:
    return MismatchError(
        f"the assignment of buffer {buffer!r} of component {share.component!r} cannot be carried out",
        cause=cause,
        code="mismatch.assignment",
        source=assignment.source,
        destination=assignment.target,
    )


def _check_boxes(assignment: Assignment, share: Share, buffer: Buffer) -> None:
    """Check boxes that a peer sent: they have the right number of axes, are not empty, and are disjoint."""
    layout = buffer.layout
    extents = [n for axis, n in enumerate(layout.shape) if axis != layout.position]
    if not 1 <= len(share.boxes) <= MAX_BOXES:
        raise _refused(assignment, share, buffer.name, f"{len(share.boxes)} boxes; 1 to {MAX_BOXES} are expected")
    for box in share.boxes:
        if not len(box.start) == len(box.stop) == len(extents) or not all(map(int.__lt__, box.start, box.stop)):
            raise _refused(assignment, share, buffer.name, f"{str(box)[:300]} is not a box of {len(extents)} axes")
        if not all(a >= 0 and b <= n for a, b, n in zip(box.start, box.stop, extents, strict=True)):
            raise _refused(assignment, share, buffer.name, "a box of it is not held by both sides")
    start = np.array([box.start for box in share.boxes], np.int64).T
    stop = np.array([box.stop for box in share.boxes], np.int64).T
    meet = np.triu(np.ones((len(share.boxes), len(share.boxes)), np.bool_), 1)
    for low, high in zip(start, stop, strict=True):  # one axis at a time, because all of them at once take much memory
        meet &= np.maximum(low[:, None], low) < np.minimum(high[:, None], high)
    if meet.any():
        which = int(np.flatnonzero(meet.any(axis=0))[0])
        raise _refused(assignment, share, buffer.name, f"{share.boxes[which]} overlaps another box")


def _digest(source: Inventory, target: Inventory, assignment: Assignment) -> bytes:
    raw = msgspec.msgpack.encode(assignment, order="deterministic")
    return hashlib.blake2b(source.digest() + target.digest() + raw, digest_size=16).digest()
