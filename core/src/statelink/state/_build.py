"""Builds components from arrays, and an inventory from components."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from statelink._arguments import shown
from statelink.errors import StateError

from ._inventory import Axis, Buffer, Component, Inventory, Partition, Region
from ._layout import Layout, Slab
from ._shares import as_int, pair
from ._signature import checked

if TYPE_CHECKING:
    from ._memory import Memory

__all__ = ["Described", "View", "component", "describe"]


class Described(NamedTuple):
    """A component, and the allocations of its buffers. ``Buffer.region`` is an index into these."""

    component: Component
    regions: tuple[Region, ...]


class View(NamedTuple):
    """One array, and the part of the global item that each of its items holds.

    Attributes:
        name: Name of the buffer.
        memory: Array whose first axis runs over items.
        shape: Global shape of one item.
        axes: Names of the global axes.
        boxes: ``(start, stop)`` of each box, in global coordinates. Boxes follow one another on the local axis
            ``stacked``, and have the array's own extent on every other axis.
        order: For each global axis, the array axis (counted without the item axis) that runs over it.
        stacked: Global axis on which several boxes are stacked in the array.
        position: Global axis of positions.
        layer: Global model layer.
        optional: Whether the other side may lack it.
        scale: Static quantisation scale.
        spare: Whether the other side may lack the last box.
        blocks: Extents of the blocks of the first global axis, if there are several.
        wider: Hint for an array that holds more than the share of this view.
    """

    name: str
    memory: Memory
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    order: tuple[int, ...]
    stacked: int = 0
    position: int | None = None
    layer: int | None = None
    optional: bool = False
    scale: float | None = None
    spare: bool = False
    blocks: tuple[int, ...] = ()
    wider: str = ""


def component(
    name: str,
    type_: str,
    views: Iterable[View],
    *,
    page: int = 0,
    window: int | None = None,
    group: int = 1,
    keep: int = 0,
    partition: Partition | None = None,
    format: str = "",
    tp: tuple[int, int] | None = None,
    replicated: bool = False,
) -> Described:
    """Build a component from views of arrays. All constructors use this function."""
    regions: dict[Region, int] = {}
    layouts: dict[Layout, Layout] = {}
    buffers = []
    for view in views:
        layout = _layout(name, view)
        # Buffers of one geometry share one Layout object, so that plans can compare them by identity.
        layout = layouts.setdefault(layout, layout)
        memory = view.memory
        count = memory.shape[0]
        if count > 1 and memory.strides[0] <= 0:
            raise StateError(
                f"the items of buffer {view.name!r} of component {name!r} are not one after the other in memory",
                cause=f"its strides are {memory.strides} bytes: the first one is "
                + ("zero, as of an expanded array" if not memory.strides[0] else "negative, as of a reversed view"),
                hint="pass the pool itself",
            )
        if count > 1 and memory.strides[0] < layout.nbytes and memory.strides[0] < max(memory.strides[1:]):
            raise StateError(
                f"buffer {view.name!r} of component {name!r} is a transposed array",
                cause=f"its strides are {memory.strides} bytes: items come first in its shape, and not in memory",
                hint="pass the array as it lies in memory, with items first",
            )
        region = regions.setdefault(memory.region, len(regions)) if count else 0
        buffers.append(
            Buffer(
                name=view.name,
                region=region,
                offset=memory.offset if count else 0,
                stride=memory.strides[0] if count > 1 else layout.nbytes,
                count=count,
                layout=layout,
                layer=None if view.layer is None else _layer(view),
                optional=view.optional,
                scale=view.scale,
            )
        )
    built = Component(
        name=name,
        type=type_,
        buffers=tuple(buffers),
        page=as_int(page, f"the page of component {name!r}"),
        window=None if window is None else as_int(window, f"the window of component {name!r}"),
        group=as_int(group, f"the group of component {name!r}"),
        keep=as_int(keep, f"what component {name!r} keeps"),
        partition=partition or Partition(),
        format=format,
        share=None if tp is None else Axis(*pair(tp, f"the rank and width of component {name!r}")),
        replicated=replicated,
    )
    return Described(built, tuple(regions))


def _layer(view: View) -> int:
    return as_int(view.layer, f"the layer of buffer {view.name!r}")


def _layout(component: str, view: View) -> Layout:
    memory = view.memory
    if len(memory.shape) != len(view.shape) + 1:
        raise StateError(
            f"buffer {view.name!r} of component {component!r} has {len(memory.shape)} axes",
            cause=f"an array of shape {memory.shape}; items first, then {', '.join(view.axes)} are expected",
        )
    counts = tuple(memory.shape[1 + axis] for axis in view.order)
    strides = tuple(memory.strides[1 + axis] for axis in view.order)
    shape, *edges = (
        tuple(as_int(n, f"an extent of buffer {view.name!r}") for n in numbers)
        for numbers in (view.shape, *(edge for box in view.boxes for edge in box))
    )
    slabs = []
    filled = 0
    for number, (start, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True), 1):
        spare = view.spare and number == len(view.boxes)
        slabs.append(Slab(start, stop, filled * strides[view.stacked], strides, optional=spare))
        filled += stop[view.stacked] - start[view.stacked]
    expected = list(slabs[0].counts)
    expected[view.stacked] = filled
    if list(counts) != expected:
        said = ", ".join(f"{axis} {n}" for axis, n in zip(view.axes, counts, strict=True))
        wanted = ", ".join(f"{axis} {n}" for axis, n in zip(view.axes, expected, strict=True))
        raise StateError(
            f"buffer {view.name!r} of component {component!r} does not hold the share it should",
            cause=f"an item of the array is {said}; this rank's share is {wanted}",
            hint=_whole(view, shape, counts, expected)
            or _transposed(view.axes, counts, expected)
            or (view.wider if _is_wider(counts, expected) else ""),
        )
    try:
        return Layout(memory.dtype, memory.itemsize, shape, view.axes, tuple(slabs), view.position, view.blocks)
    except StateError as error:
        reason = error.reason
        named = f"buffer {view.name!r} of component {component!r}: {reason.what}"
        raise StateError.of(msgspec.structs.replace(reason, what=named)) from None


def _transposed(axes: Sequence[str], counts: Sequence[int], expected: Sequence[int]) -> str:
    """A hint if another axis of the array has the extent that this axis should have."""
    for axis, (count, wanted) in enumerate(zip(counts, expected, strict=True)):
        for other, there in enumerate(counts):
            if count != wanted and there == wanted and other != axis:
                return (
                    f"the array looks transposed: its axis {axes[other]!r} has the {wanted} of axis {axes[axis]!r}; "
                    "order='hnd' says that pages have heads first, transposed=True that channels are last"
                )
    return ""


def _whole(view: View, shape: Sequence[int], counts: Sequence[int], expected: Sequence[int]) -> str:
    """A hint if the array holds the whole model's share, on the first axis with a wrong extent."""
    for axis, whole, count, wanted in zip(view.axes, shape, counts, expected, strict=True):
        if count != wanted:
            return (
                f"the array has as many on axis {axis!r} as the whole model is said to have: 'heads', 'conv_groups' "
                "and the like are the whole model's numbers, not this rank's; tp=(rank, width) says which share"
                if count == whole
                else ""
            )
    return ""


def _is_wider(counts: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether the array holds more than this rank's share, on the first axis with a wrong extent."""
    return next((count > wanted for count, wanted in zip(counts, expected, strict=True) if count != wanted), False)


@checked
def describe(
    instance: str,
    components: Iterable[Described],
    *,
    rank: int = 0,
    ranks: int = 1,
    axes: Mapping[str, tuple[int, int]] | None = None,
    model: str = "",
) -> Inventory:
    """Put components together into the inventory of one rank.

    Args:
        instance: Name of the instance that this rank belongs to.
        components: Results of the constructors of this package.
        rank: This rank's number in the instance.
        ranks: Number of ranks in the instance.
        axes: ``(index, size)`` on each parallel axis. ``tp`` and ``pp`` have a meaning: a component's share must agree
            with ``tp``, and two stages of ``pp`` must not list the same layer.
        model: The model's identity (revision, adapters). It is compared verbatim with the other side's.

    An allocation that several components share is registered once, even if it is inside another allocation.

    Warning:
        The inventory keeps addresses, and no reference to an array. Keep the arrays for as long as a link uses them.
        If Python frees them earlier, requests read and write memory that belongs to something else: wrong bytes, a
        corrupt heap or a crash, and no error.

    Raises:
        StateError: The description contradicts itself.
    """
    if not isinstance(components, Iterable):
        raise StateError(
            f"components are {shown(components)}", cause="a list of what the constructors return is expected"
        )
    described = list(components)
    _check_described(described)
    merged = _merge(region for each in described for region in each.regions)
    starts = [(outer.kind, outer.address) for outer in merged]
    # Numbered in the order of first use, not of addresses, so that a description is the same in every process.
    numbers: dict[Region, int] = {}
    outer_of: dict[Region, Region] = {}
    built = []
    for each in described:
        buffers = []
        for buffer in each.component.buffers:
            if buffer.count:
                region = each.regions[buffer.region]
                if region not in outer_of:
                    outer_of[region] = merged[bisect_right(starts, (region.kind, region.address)) - 1]
                outer = outer_of[region]
                number = numbers.setdefault(outer, len(numbers))
                shift = region.address - outer.address
                buffer = msgspec.structs.replace(buffer, region=number, offset=buffer.offset + shift)
            buffers.append(buffer)
        built.append(msgspec.structs.replace(each.component, buffers=tuple(buffers)))
    return Inventory(
        instance=instance,
        rank=as_int(rank, "the rank"),
        ranks=as_int(ranks, "the number of ranks"),
        axes={
            name: Axis(*pair(coordinate, f"the coordinate on axis {name!r}"))
            for name, coordinate in (axes or {}).items()
        },
        regions=tuple(numbers),
        components=tuple(built),
        model=model,
    )


def _check_described(given: Sequence[object]) -> None:
    """Refuse a single component. It is a tuple, and would otherwise be taken for a list of components."""
    for each in given:
        if not isinstance(each, Described):
            raise StateError(
                "components are a list of what the constructors return",
                cause=f"got {type(each).__name__} in it",
                hint="one component alone is a list of one",
            )


def _merge(regions: Iterable[Region]) -> list[Region]:
    """The regions that are in no other region, sorted by kind and address. No two overlap."""
    kept: list[Region] = []
    for region in sorted(set(regions), key=lambda r: (r.kind, r.address, -r.nbytes)):
        if kept and kept[-1].kind == region.kind and region.address < kept[-1].address + kept[-1].nbytes:
            if not _inside(region, kept[-1]):
                raise StateError(
                    "two regions overlap without one holding the other",
                    cause=f"{kept[-1].nbytes} bytes at {kept[-1].address:#x} and "
                    f"{region.nbytes} bytes at {region.address:#x}",
                    hint="describe the allocation that both lie in as their region",
                )
            continue
        kept.append(region)
    return kept


def _inside(inner: Region, outer: Region) -> bool:
    end = inner.address + inner.nbytes
    return inner.kind == outer.kind and outer.address <= inner.address and end <= outer.address + outer.nbytes
