"""Regions, buffers, components and the inventory of one rank."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from statelink._arguments import real, shown, text
from statelink.errors import StateError

from ._layout import MAX_BYTES, Layout
from ._overlap import check_apart
from ._shares import check_shares, settle_ints, settle_switches
from ._types import Coverage, IndexSpace, StateType, state_type

if TYPE_CHECKING:
    from ._diff import Difference

__all__ = ["Axis", "Buffer", "Component", "Inventory", "Partition", "Region"]

MAX_NAME = 255
MAX_REGIONS = 1 << 16
MAX_BUFFERS = 1 << 16
MAX_COMPONENTS = 1024
MAX_EFFORT = 1 << 18
"""Most units that checks of the different layouts of one inventory may cost: for example, 4096 layouts of one slab."""
MAX_RANKS = 1 << 16
MAX_LAYER = (1 << 31) - 1
"""The largest number of a layer of a model."""
MAX_KIND = 64
"""Most characters of a memory kind."""
UINT64 = 1 << 64


class Region(msgspec.Struct, frozen=True):
    """One registered allocation.

    The memory belongs to the engine, and must outlive the link that registers it.

    Attributes:
        address: Address of its first byte, unsigned 64-bit.
        nbytes: Length in bytes, at least 1.
        kind: Memory kind, such as ``dram``, ``cuda:0`` or ``npu:1``.
    """

    address: int
    nbytes: int
    kind: str = "dram"

    def __post_init__(self) -> None:
        settle_ints(self, "a region", "address", "nbytes")
        text(self.kind, "the memory kind of a region", most=MAX_KIND)
        if not 0 < self.address < UINT64 or self.nbytes < 1 or self.address + self.nbytes > UINT64:
            raise StateError("a region is a range of memory", cause=f"address {self.address}, {self.nbytes} bytes")


class Buffer(msgspec.Struct, frozen=True):
    """A named view of a region: items of one layout, at a fixed stride.

    A listed buffer has authoritative bytes. A rank that holds zeros or scratch there does not list it.

    Attributes:
        name: Name. Buffers of the same name on the two sides are paired.
        region: Index into the inventory's regions.
        offset: Bytes from the start of the region to item 0.
        stride: Bytes between neighbouring items.
        count: Number of items; 0 for a buffer that is listed but holds nothing.
        layout: Layout of one item.
        layer: Global model layer, or ``None`` if it belongs to no layer.
        optional: Whether the other side may lack it (draft layers that only decode has).
        scale: Static quantisation scale of its elements, compared exactly; ``None`` if there is none.
    """

    name: str
    region: int
    offset: int
    stride: int
    count: int
    layout: Layout
    layer: int | None = None
    optional: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        _check_name("buffer", self.name)
        what = f"buffer {self.name!r}"
        settle_ints(self, what, "region", "offset", "stride", "count", "layer")
        settle_switches(self, what, "optional")
        if min(self.region, self.offset, self.stride, self.count) < 0:
            raise StateError(f"{what} has a negative region, offset, stride or count")
        if max(self.region, self.offset, self.stride, self.count) > MAX_BYTES:
            raise StateError(f"{what} has a region, offset, stride or count above 2^62")
        if self.layer is not None and not 0 <= self.layer <= MAX_LAYER:
            raise StateError(
                f"the layer of {what} is {self.layer}",
                cause=f"layers of a model are counted from 0, and at most to {MAX_LAYER}",
            )
        if self.scale is not None:
            scale = real(self.scale)
            if scale is None or math.isinf(scale):
                raise StateError(f"the scale of {what} is {shown(self.scale)}", cause="a finite number is expected")
            msgspec.structs.force_setattr(self, "scale", scale)
        if not isinstance(self.layout, Layout):
            raise StateError(f"the layout of {what} is {shown(self.layout)}", cause="a Layout is expected")
        if self.count > 1 and self.stride < self.layout.nbytes:
            raise StateError(
                f"items of buffer {self.name!r} overlap",
                cause=f"an item ends after {self.layout.nbytes} bytes but the stride is {self.stride}",
            )

    @property
    def end(self) -> int:
        """Bytes from the start of the region to the end of the last item."""
        return self.offset + (self.count - 1) * self.stride + self.layout.nbytes if self.count else self.offset


class Partition(msgspec.Struct, frozen=True):
    """Which positions of a sequence a rank holds.

    Attributes:
        kind: ``all``, ``contiguous`` or ``cyclic``. With ``contiguous``, a request's pages are cut into ``size``
            consecutive ranges; if they are uneven, the first ranges have one page more; items have the numbers of the
            whole sequence. With ``cyclic``, rank ``b mod size`` holds block ``b``, of ``block`` positions; each rank
            numbers its own items.
        size: Number of ranks that share the positions.
        index: This rank's number among them.
        block: Positions of one block, for ``cyclic``; 1 for the others, which have no blocks.
    """

    kind: str = "all"
    size: int = 1
    index: int = 0
    block: int = 1

    def __post_init__(self) -> None:
        settle_ints(self, "a partition", "size", "index", "block")
        text(self.kind, "the kind of a partition", most=MAX_KIND)
        if self.kind not in ("all", "contiguous", "cyclic"):
            raise StateError(f"no partition kind {shown(self.kind)}", hint="'all', 'contiguous' or 'cyclic'")
        if self.size < 1 or not 0 <= self.index < self.size or self.block < 1:
            raise StateError("a partition has an index below its size", cause=f"{self.index} of {self.size}")
        if self.kind == "all" and self.size != 1:
            raise StateError("partition 'all' has size 1", cause=f"size is {self.size}")
        if self.kind != "cyclic" and self.block != 1:
            raise StateError(f"partition {self.kind!r} has no blocks", cause=f"block is {self.block}")


class Axis(msgspec.Struct, frozen=True):
    """A rank's coordinate on one parallel axis, and the axis's size."""

    index: int
    size: int

    def __post_init__(self) -> None:
        settle_ints(self, "a parallel coordinate", "index", "size")
        if self.size < 1 or not 0 <= self.index < self.size:
            raise StateError("a parallel coordinate lies below its axis's size", cause=f"{self.index} of {self.size}")


class Component(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # `dict` is for what is computed once
    """One named part of state on one rank.

    Attributes:
        name: Name; by default that of its type. Components of the same name on the two sides are paired.
        type: Name of its state type.
        buffers: Its buffers. An index addresses one item in each of them.
        page: Positions of one item; 0 if items do not stand for positions.
        window: Positions that a component with coverage ``window`` or ``recent`` keeps, else ``None``.
        group: Positions of one group, for coverages ``tail`` and ``open`` and for types that count complete groups;
            else 1. Coverage ``open`` needs at least 2.
        keep: Positions before the open group that are also kept, for coverage ``tail``.
        partition: Which positions this rank holds.
        format: Tag for properties that strides do not express (a swizzle, a quantisation packing). Compared verbatim.
        share: This rank's number among the TP ranks that share the heads or channels of its items; ``None`` if there
            are none.
        replicated: Whether other ranks of the instance may list the same part with the same bytes. Without it, two
            ranks that hold the same part of a buffer are refused, unless they have different numbers in ``share``,
            because there are more ranks than heads.
    """

    name: str
    type: str
    buffers: tuple[Buffer, ...]
    page: int = 0
    window: int | None = None
    group: int = 1
    keep: int = 0
    partition: Partition = Partition()
    format: str = ""
    share: Axis | None = None
    replicated: bool = False

    def __post_init__(self) -> None:
        _check_name("component", self.name)
        what = f"component {self.name!r}"
        settle_ints(self, what, "page", "window", "group", "keep")
        settle_switches(self, what, "replicated")
        text(self.format, f"the format of {what}")
        if max(self.page, self.window or 0, self.group, self.keep) > MAX_BYTES:
            raise StateError(f"{what} has a page, window, group or keep above 2^62")
        if not isinstance(self.partition, Partition):
            raise StateError(f"the partition of {what} is {shown(self.partition)}", cause="a Partition is expected")
        if not isinstance(self.share, Axis | None):
            raise StateError(f"the share of {what} is {shown(self.share)}", cause="an Axis is expected")
        kind = state_type(self.type)
        if kind.positional != (self.page > 0):
            raise StateError(
                f"component {self.name!r} of type {kind.name!r} has {self.page} positions an item",
                cause="items of this type stand for positions" if kind.positional else "its items are one a request",
            )
        if self.partition.kind == "cyclic" and self.page % self.partition.block and self.partition.block % self.page:
            raise StateError(
                f"component {self.name!r} deals its positions out in blocks of {self.partition.block}",
                cause=f"a page has {self.page} positions, and neither divides the other: no page would be whole",
                hint="choose a block that the page divides, or that divides the page",
            )
        windowed = kind.coverage in (Coverage.WINDOW, Coverage.RECENT)
        if windowed != (self.window is not None) or (self.window is not None and self.window < 1):
            raise StateError(
                f"component {self.name!r} of type {kind.name!r} has window {self.window}",
                hint="a window-covered type needs its window in tokens, and only such a type has one",
            )
        if kind.coverage is Coverage.OPEN and (self.group < 2 or self.keep):
            raise StateError(
                f"component {self.name!r} of type {kind.name!r} has groups of {self.group} and keeps {self.keep}",
                cause="of groups of one position, none is ever open" if self.group == 1 else "",
                hint="a type with coverage 'open' needs the positions of a group, at least 2, and keeps none before it",
            )
        grouped = kind.coverage in (Coverage.TAIL, Coverage.OPEN) or kind.complete
        if self.group < 1 or self.keep < 0 or (not grouped and (self.group, self.keep) != (1, 0)):
            raise StateError(
                f"component {self.name!r} of type {kind.name!r} has groups of {self.group} and keeps {self.keep}",
                hint="groups are at least 1, and belong to types with coverage 'tail' or 'open', or complete groups",
            )
        if kind.index is IndexSpace.PAGE and kind.coverage is Coverage.TAIL and self.page != self.group:
            raise StateError(
                f"component {self.name!r} of type {kind.name!r} has {self.page} positions an item",
                cause=f"an item holds one open group, of {self.group}",
            )
        if not isinstance(self.buffers, tuple) or not all(isinstance(each, Buffer) for each in self.buffers):
            raise StateError(f"the buffers of {what} are {shown(self.buffers)}", cause="a tuple of Buffer is expected")
        names = [buffer.name for buffer in self.buffers]
        if not names or len(names) > MAX_BUFFERS or len(set(names)) != len(names):
            raise StateError(
                f"component {self.name!r} needs buffers, each with a name of its own",
                cause=_twice(names) or f"it has {len(names)}; 1 to {MAX_BUFFERS} are possible",
            )
        shared: dict[bytes, Layout] = {}
        for buffer in self.buffers:
            first = shared.setdefault(buffer.layout.geometry(), buffer.layout)
            if first is buffer.layout:
                self._check_positions(buffer)
            else:
                # Buffers of one geometry share one object, also after decoding, because plans compare by identity.
                msgspec.structs.force_setattr(buffer, "layout", first)

    def _check_positions(self, buffer: Buffer) -> None:
        layout = buffer.layout
        axis = layout.position
        if axis is None:
            return
        rows = layout.shape[axis]
        if not self.page or self.page % rows:
            raise StateError(
                f"buffer {buffer.name!r} of component {self.name!r} has {rows} rows on axis {layout.axes[axis]!r}",
                cause=f"an item of the component has {self.page} positions: each row stands for as many of them",
            )
        for slab in layout.slabs:
            if (slab.start[axis], slab.counts[axis]) != (0, rows):
                raise StateError(
                    f"a slab of buffer {buffer.name!r} of component {self.name!r} holds only some positions of an item",
                    cause=f"rows [{slab.start[axis]}, {slab.stop[axis]}) of {rows}",
                    hint="say with the component's partition which positions a rank holds",
                )

    def ratio(self, buffer: Buffer) -> int:
        """Positions for which one row of ``buffer`` stands: above 1 if it is compressed, 0 if it has no rows."""
        axis = buffer.layout.position
        return 0 if axis is None else self.page // buffer.layout.shape[axis]

    @functools.cached_property
    def kind(self) -> StateType:
        """The state type itself."""
        return state_type(self.type)

    @functools.cached_property
    def count(self) -> int | None:
        """Number of items that every buffer has; ``None`` if no buffer has any.

        No buffer has any if all layers share another layer's index. Then any index is right: it addresses nothing.
        """
        return min((buffer.count for buffer in self.buffers if buffer.count), default=None)


class Inventory(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # `dict` is for what is computed once
    """Everything that one rank holds, and which rank it is.

    Attributes:
        instance: Name of the instance (one attention-DP group of a model in one role).
        rank: This rank's number in the instance, from 0.
        ranks: Number of ranks in the instance.
        axes: Coordinates on each parallel axis, such as ``{"tp": Axis(1, 4)}``. Plans use slabs, and not axes. But a
            description that contradicts ``tp`` or ``pp`` is refused.
        regions: Registered memory.
        components: Named parts of state.
        model: The model's identity as the engine states it (revision, adapters); compared verbatim.
    """

    instance: str
    components: tuple[Component, ...]
    regions: tuple[Region, ...]
    rank: int = 0
    ranks: int = 1
    axes: dict[str, Axis] = {}
    model: str = ""

    def __post_init__(self) -> None:
        _check_name("instance", self.instance)
        settle_ints(self, "an inventory", "rank", "ranks")
        text(self.model, "the model's identity")
        for field, expected in (("components", Component), ("regions", Region)):
            given = getattr(self, field)
            if not isinstance(given, tuple) or not all(isinstance(each, expected) for each in given):
                cause = f"a tuple of {expected.__name__} is expected"
                raise StateError(f"the {field} of an inventory are {shown(given)}", cause=cause)
        if not isinstance(self.axes, dict):
            raise StateError(f"the axes of an inventory are {shown(self.axes)}", cause="a dict is expected")
        for name, axis in self.axes.items():
            _check_name("axis", name)
            if not isinstance(axis, Axis):
                raise StateError(f"axis {name!r} of an inventory is {shown(axis)}", cause="an Axis is expected")
        if not 0 <= self.rank < self.ranks <= MAX_RANKS:
            raise StateError(f"rank {self.rank} of an instance of {self.ranks}")
        if len(self.regions) > MAX_REGIONS:
            raise StateError(f"an inventory has at most {MAX_REGIONS} regions", cause=f"{len(self.regions)} given")
        names = [component.name for component in self.components]
        if len(names) > MAX_COMPONENTS:
            raise StateError(f"an inventory has at most {MAX_COMPONENTS} components", cause=f"{len(names)} given")
        if len(set(names)) != len(names):
            raise StateError(
                "every component has a name of its own", cause=_twice(names), hint="name= of a constructor sets it"
            )
        layouts = {id(buffer.layout): buffer.layout for each in self.components for buffer in each.buffers}
        effort = sum({layout.geometry(): layout.effort for layout in layouts.values()}.values())
        if effort > MAX_EFFORT:
            raise StateError(
                "an inventory has too many different layouts, slabs or pieces of items",
                cause=f"to check it costs {effort} units, and at most {MAX_EFFORT} are spent",
                hint="describe what a rank holds in fewer slabs, and buffers that are alike by equal layouts",
            )
        for component in self.components:
            for buffer in component.buffers:
                self._check(component, buffer)
            check_apart(component)
        check_shares(self.components, self.axes.get("tp"))

    def _check(self, component: Component, buffer: Buffer) -> None:
        if not buffer.count:
            return
        if buffer.region >= len(self.regions):
            raise StateError(
                f"buffer {buffer.name!r} of component {component.name!r} is in region {buffer.region}",
                cause=f"the inventory has {len(self.regions)}",
            )
        region = self.regions[buffer.region]
        if buffer.end > region.nbytes:
            raise StateError(
                f"buffer {buffer.name!r} of component {component.name!r} leaves its region",
                cause=f"it ends at byte {buffer.end} of {region.nbytes}",
            )

    def component(self, name: str) -> Component:
        """The component called ``name``.

        Raises:
            StateError: There is no such component.
        """
        known = self.by_name.get(name)
        if known is not None:
            return known
        raise StateError(
            f"no component named {name!r}",
            cause=f"rank {self.rank} of {self.instance!r} has {', '.join(self.by_name) or 'none'}",
        )

    @functools.cached_property
    def by_name(self) -> Mapping[str, Component]:
        """The components by their names, in order."""
        return MappingProxyType({component.name: component for component in self.components})

    def digest(self) -> bytes:
        """A digest of 16 bytes over everything in this inventory except addresses.

        Equal inventories in two processes have equal digests.
        """
        regions = [(region.nbytes, region.kind) for region in self.regions]
        known = (self.instance, self.rank, self.ranks, self.axes, self.model, self.components, regions)
        raw = msgspec.msgpack.encode(known, order="deterministic")
        return hashlib.blake2b(raw, digest_size=16).digest()

    def diff(self, other: Inventory) -> list[Difference]:
        """Every field on which a source and a destination disagree, although they must agree.

        Compares by name, in both directions, how both sides describe the *global* state. Parallel layouts, strides and
        memory may differ. See ``statelink.plan.match`` for whole instances.
        """
        from ._diff import diff_inventories

        return diff_inventories(self, other)


def _twice(names: Sequence[str]) -> str:
    """The names that occur more than once, in words; empty if there are none."""
    counts = Counter(names)
    return ", ".join(f"{name!r} is named {_times(count)}" for name, count in counts.items() if count > 1)


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        article = "an" if what[0] in "aeiou" else "a"
        raise StateError(
            f"{article} {what} needs a printable name of 1 to {MAX_NAME} characters", cause=f"got {shown(name)}"
        )
