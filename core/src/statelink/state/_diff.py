"""Compares how two sides describe the same global state, field by field."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._inventory import Buffer, Component, Inventory
    from ._layout import Layout

__all__ = ["Difference", "diff_components", "diff_inventories"]


class Difference(NamedTuple):
    """One field on which two sides disagree.

    Attributes:
        path: The field, such as ``kv/layers.3.k: dtype``.
        ours: This side's value.
        theirs: The other side's value.
    """

    path: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.path}: {self.ours} here, {self.theirs} there"


def diff_inventories(ours: Inventory, theirs: Inventory) -> list[Difference]:
    """See `Inventory.diff`."""
    found: list[Difference] = []
    if ours.model != theirs.model:
        found.append(Difference("model", repr(ours.model), repr(theirs.model)))
    mine, other = ours.by_name, theirs.by_name
    for name in sorted(mine.keys() | other.keys()):
        if name not in mine or name not in other:
            if all(buffer.optional for buffer in (mine.get(name) or other[name]).buffers):
                continue
            found.append(_presence(name, name in mine))
            continue
        found.extend(diff_components(mine[name], other[name]))
        found.extend(_missing_buffers(mine[name], other[name]))
    return found


def diff_components(ours: Component, theirs: Component) -> list[Difference]:
    """Fields on which two components of one name disagree. Buffers are compared if both sides have them."""
    name = ours.name
    found: list[Difference] = []
    if ours.kind.name != theirs.kind.name:
        found.append(Difference(f"{name}: type", ours.type, theirs.type))
    for field in ("format", "window", "group", "keep"):
        a, b = getattr(ours, field), getattr(theirs, field)
        if a != b:
            found.append(Difference(f"{name}: {field}", repr(a), repr(b)))
    other = {buffer.name: buffer for buffer in theirs.buffers}
    whole: list[str] = []
    for buffer in ours.buffers:
        if buffer.name in other:
            found.extend(_diff_buffers(ours, theirs, buffer, other[buffer.name]))
            both = (buffer, other[buffer.name])
            if all(each.count for each in both) and any(each.layout.position is None for each in both):
                whole.append(buffer.name)
    if ours.page != theirs.page and whole:
        path = f"{name}: tokens an item (buffer {whole[0]} has no position axis to split on)"
        found.append(Difference(path, str(ours.page), str(theirs.page)))
    return found


def _diff_buffers(mine: Component, other: Component, ours: Buffer, theirs: Buffer) -> Iterator[Difference]:
    path = f"{mine.name}/{ours.name}"
    if bool(ours.count) != bool(theirs.count) and not mine.kind.elide_empty:
        yield Difference(f"{path}: items", str(ours.count), str(theirs.count))
    if not ours.count or not theirs.count:
        return
    a, b = ours.layout, theirs.layout
    for field in ("dtype", "itemsize", "axes"):
        if getattr(a, field) != getattr(b, field):
            yield Difference(f"{path}: {field}", str(getattr(a, field)), str(getattr(b, field)))
    for field in ("layer", "scale"):
        if getattr(ours, field) != getattr(theirs, field):
            yield Difference(f"{path}: {field}", str(getattr(ours, field)), str(getattr(theirs, field)))
    if mine.ratio(ours) != other.ratio(theirs) and a.position == b.position:
        yield Difference(f"{path}: positions a row", str(mine.ratio(ours)), str(other.ratio(theirs)))
    if a.position != b.position:
        yield Difference(f"{path}: position axis", str(a.position), str(b.position))
    elif len(a.shape) == len(b.shape):
        for axis, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)):
            if n != m and axis != a.position and not _surplus_is_optional(a, b, axis):
                yield Difference(f"{path}: extent of axis {a.axes[axis]!r}", str(n), str(m))
        if a.blocks != b.blocks and a.shape[0] == b.shape[0]:
            yield Difference(f"{path}: blocks of axis {a.axes[0]!r}", _blocks(a), _blocks(b))
    else:
        yield Difference(f"{path}: shape of an item", str(a.shape), str(b.shape))


def _blocks(layout: Layout) -> str:
    return str(list(layout.blocks)) if layout.blocks else "one"


def _surplus_is_optional(a: Layout, b: Layout, axis: int) -> bool:
    """Whether only optional slabs hold the part of this axis that the larger side has beyond the smaller one."""
    larger, smaller = (a, b) if a.shape[axis] > b.shape[axis] else (b, a)
    beyond = [slab.optional for slab in larger.slabs if slab.stop[axis] > smaller.shape[axis]]
    return bool(beyond) and all(beyond)


def _presence(path: str, ours: bool) -> Difference:
    return Difference(path, "present" if ours else "absent", "absent" if ours else "present")


def _missing_buffers(ours: Component, theirs: Component) -> Iterator[Difference]:
    mine = {buffer.name: buffer for buffer in ours.buffers}
    other = {buffer.name: buffer for buffer in theirs.buffers}
    for name in sorted(mine.keys() ^ other.keys()):
        if not (mine.get(name) or other[name]).optional:
            yield _presence(f"{ours.name}/{name}", name in mine)
