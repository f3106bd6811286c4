"""Checks that decode's ranks together hold everything that prefill's ranks hold, and that no rank lacks a copy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from statelink.errors import MismatchError

from ._boxes import Box, cells, intersect, slab_box
from ._ranks import Numbered, range_of

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from statelink.state import Buffer, Component, Inventory, Partition

__all__ = ["check_cover"]


class _Held(NamedTuple):
    inventory: Inventory
    component: Component
    buffer: Buffer

    @property
    def partition(self) -> Partition:
        return self.component.partition


def check_cover(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> None:
    """Check that every part of what prefill holds has a place on decode.

    `route` finds bytes that decode wants and nobody holds. This function finds bytes that prefill holds and no decode
    rank wants. Without it they would be lost silently, for example if a decode rank is missing, or describes another
    rank's part. It checks this: for every buffer that both sides hold, the boxes of decode's ranks together contain
    those of prefill's ranks. The ranks that hold a box have all shares of its positions. A decode rank that lists some
    buffers of a layer lists all of them. The decode ranks of one pipeline stage list the same layers.

    Prefill's ranks need not list the same: what one rank does not list, another one that holds a copy sends.

    Args:
        sources: All ranks of the prefill instance.
        targets: All ranks of the decode instance.

    Raises:
        MismatchError: Names the buffer and the part that no decode rank holds (``mismatch.uncovered``), or the rank
            that lacks a layer of its stage (``mismatch.stage``).
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
        _check_shares(here)
    _check_copies(theirs.keys(), targets)


def _holders(inventories: Sequence[Inventory]) -> dict[tuple[str, str], list[_Held]]:
    found: dict[tuple[str, str], list[_Held]] = {}
    for inventory in inventories:
        for component in inventory.components:
            for buffer in component.buffers:
                if buffer.count:
                    held = _Held(inventory, component, buffer)
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


def _check_shares(holders: Sequence[_Held]) -> None:
    """Refuse a buffer of which some TP ranks list their share, and others do not.

    If there are more ranks than heads, several ranks hold the same heads, and those that list it cover the others.
    """
    listed: dict[int, dict[int, _Held]] = {}
    for each in holders:
        share = each.component.share
        if share is not None and share.size > 1:
            listed.setdefault(share.size, {}).setdefault(share.index, each)
    for size, indices in listed.items():
        if len(indices) < size:
            one = next(iter(indices.values()))
            gone = next(index for index in range(size) if index not in indices)
            raise MismatchError(
                f"no decode rank lists share {gone} of {size} of buffer {one.buffer.name!r}",
                cause=f"rank {one.inventory.rank} lists another share of {size}, and each TP rank needs its own",
                hint="all ranks of a pipeline stage must be present, and list the same layers",
                code="mismatch.stage",
                component=one.component.name,
                decode=one.inventory.instance,
            )


class _Listed(NamedTuple):
    """The layers of one rank.

    Attributes:
        stage: Its pipeline stage, if it says so.
        shared: Name of each component that ranks share or copy, to the buffers of layers that this rank lists.
        layered: Component and buffer of everything that belongs to a layer, and that the other side may not lack.
    """

    stage: int | None
    shared: dict[str, frozenset[str]]
    layered: frozenset[tuple[str, str]]


def _check_copies(sent: AbstractSet[tuple[str, str]], targets: Sequence[Inventory]) -> None:
    """Refuse a decode rank without a layer that another rank of its stage lists.

    Every rank of a stage needs its own part of the layer. If another rank has a copy of that part, the parts together
    cover the layer, and only the lists themselves say that one is missing. A component of which its rank says neither
    that ranks copy nor that they share it may be on that rank alone.

    Ranks are of one stage if they say so with the axis ``pp``. Without that axis, they are if they list the same buffer
    of a layer: no layer is on two stages.

    Args:
        sent: Component and buffer of everything that prefill holds.
        targets: All ranks of the decode instance.
    """
    if len(targets) < 2:
        return
    shared = {each.name for rank in targets for each in rank.components if _is_shared(each)}
    # Most ranks list what another one lists, so only a few different lists are compared.
    kinds: dict[tuple[object, ...], tuple[Inventory, _Listed]] = {}
    for rank in targets:
        listed = _listed(rank, shared, sent)
        key = listed.stage, frozenset(listed.shared.items()), listed.layered
        kinds.setdefault(key, (rank, listed))
    different = list(kinds.values())
    for number, (one, mine) in enumerate(different):
        for other, theirs in different[:number]:
            for name in sorted(mine.shared.keys() | theirs.shared.keys()):
                here, there = (each.shared.get(name, frozenset()) for each in (mine, theirs))
                if here == there or not _of_one_stage(mine, theirs, here & there):
                    continue
                lacking, having, gone = (other, one, here - there) if here - there else (one, other, there - here)
                _refuse_copy(lacking, having, name, min(gone), mine.stage)


def _is_shared(component: Component) -> bool:
    """Whether a rank says that other ranks have a copy or a part of a component of theirs."""
    share = component.share
    return component.replicated or component.partition.size > 1 or (share is not None and share.size > 1)


def _listed(rank: Inventory, shared: AbstractSet[str], sent: AbstractSet[tuple[str, str]]) -> _Listed:
    listed: dict[str, frozenset[str]] = {}
    layered: set[tuple[str, str]] = set()
    for component in rank.components:
        names = set()
        for buffer in component.buffers:
            if buffer.layer is not None and buffer.count and (component.name, buffer.name) in sent:
                names.add(buffer.name)
                if not buffer.optional:
                    layered.add((component.name, buffer.name))
        if names and component.name in shared:
            listed[component.name] = frozenset(names)
    return _Listed(_stage(rank), listed, frozenset(layered))


def _stage(rank: Inventory) -> int | None:
    """The rank's pipeline stage. There is one stage if other axes account for all ranks."""
    stage = rank.axes.get("pp")
    if stage is not None:
        return stage.index
    return 0 if rank.axes and math.prod(axis.size for axis in rank.axes.values()) == rank.ranks else None


def _of_one_stage(one: _Listed, other: _Listed, common: AbstractSet[str]) -> bool:
    if one.stage is not None and other.stage is not None:
        return one.stage == other.stage
    return bool(common) or not one.layered.isdisjoint(other.layered)


def _refuse_copy(lacking: Inventory, having: Inventory, component: str, buffer: str, stage: int | None) -> None:
    why = f"both are on pipeline stage {stage}" if stage is not None else "both list the same buffers of other layers"
    raise MismatchError(
        f"decode rank {lacking.rank} lacks buffer {buffer!r}",
        cause=f"rank {having.rank} lists it, {why}, and each rank of a stage needs its own part of every layer",
        hint="list the same layers on all ranks of a pipeline stage, each with items, and give the ranks of different "
        "stages their own 'pp' in axes",
        code="mismatch.stage",
        component=component,
        decode=lacking.instance,
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
