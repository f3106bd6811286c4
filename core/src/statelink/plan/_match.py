"""Compares two instances by name, in both directions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from statelink.errors import MismatchError
from statelink.state import Buffer, Component, Difference, Inventory, Layout
from statelink.state._diff import diff_components

from ._cover import check_cover
from ._positions import granule_of
from ._ranks import check_ranks

__all__ = ["differences", "match"]

SHOWN = 12
MOST_LISTED_BUFFERS = 2
"""Most buffers for which an error has a line each."""
NAMED = 4
"""Most buffers that one line names. It counts the rest."""
LAYERED = re.compile(r"layers\.(\d+)\.(.+)")


def differences(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> list[Difference]:
    """A line for every field on which two instances disagree, with the destination's value first.

    Whole instances are compared. A pipeline stage need not hold what another one holds, but each component, and each
    buffer that is not optional, must exist on both sides.
    """
    found: dict[Difference, None] = {}
    for theirs, ours in {(source.model, target.model): None for target in targets for source in sources}:
        if theirs != ours:
            found[Difference("model", repr(ours), repr(theirs))] = None
    here, there = _by_name(targets), _by_name(sources)
    renamed = _renamed(here, there)
    for name in sorted(here.keys() | there.keys()):
        if name not in here or name not in there:
            present = here.get(name) or there[name]
            if all(buffer.optional for each in present for buffer in each.buffers) and name not in renamed:
                continue
            path = f"component {name} (type {present[0].kind.name})"
            found[_presence(path, name in here)] = None
            continue
        # Ranks that differ only in which part they hold need not be compared again.
        for ours_ in _unlike(here[name]):
            for theirs_ in _unlike(there[name]):
                found.update(dict.fromkeys(diff_components(ours_, theirs_)))
                found.update(dict.fromkeys(_cut(ours_, theirs_)))
        found.update(dict.fromkeys(_buffers(name, here[name], there[name])))
    return list(found)


def match(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> None:
    """Check that these sources can serve these destinations, by names and geometry.

    Both must be whole instances. The function also checks that no two ranks of one instance contradict each other, and
    that decode's ranks together hold everything that prefill's ranks hold.

    Raises:
        MismatchError: The instances differ; the error lists the fields, with the destination's value first. Or two
            ranks of one side contradict each other (``mismatch.axes``, ``mismatch.layers``, ``mismatch.replicas``), or
            a part that prefill holds has no place on decode (``mismatch.uncovered``), or a decode rank lacks a layer of
            its stage (``mismatch.stage``).
    """
    found = differences(sources, targets)
    if found:
        lines = _lines(found)
        if len(lines) > SHOWN:
            lines = [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]
        raise MismatchError(
            "prefill and decode do not describe the same state",
            cause="; ".join(lines),
            hint="both engines must be configured for the same model, cache dtype and layout",
            prefill=sources[0].instance,
            decode=targets[0].instance,
        )
    check_ranks(sources, "prefill")
    check_ranks(targets, "decode")
    check_cover(sources, targets)


def _lines(found: Sequence[Difference]) -> list[str]:
    """One line for each field and pair of values, for any number of buffers. One or two buffers are named in full."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for each in found:
        place, _, field = each.path.partition(": ")
        component, _, buffer = place.partition("/")
        alike.setdefault((component, field, each.ours, each.theirs), []).append(buffer)
    return [
        f"{component}{'/' if name else ''}{name}{': ' if field else ''}{field}: {ours} on decode, {theirs} on prefill"
        for (component, field, ours, theirs), buffers in alike.items()
        for name in (buffers if len(buffers) <= MOST_LISTED_BUFFERS else [_names(buffers)])
    ]


def _names(buffers: Sequence[str]) -> str:
    """Names of buffers in short: ``layers.0-95.{k,v}`` if all parts have the same layers."""
    parts: dict[str, list[int]] = {}
    for name in buffers:
        found = LAYERED.fullmatch(name)
        if found is None:
            more = len(buffers) - NAMED
            return ", ".join(buffers[:NAMED]) + (f" and {more} more" if more > 0 else "")
        parts.setdefault(found[2], []).append(int(found[1]))
    groups: dict[str, list[str]] = {}
    for part, layers in parts.items():
        groups.setdefault(_ranges(sorted(set(layers))), []).append(part)
    return ", ".join(
        f"layers.{layers}.{names[0] if len(names) == 1 else '{' + ','.join(names) + '}'}"
        for layers, names in groups.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    said = []
    first = before = numbers[0]
    for number in (*numbers[1:], -1):
        if number != before + 1:
            said.append(str(first) if first == before else f"{first}-{before}")
            first = number
        before = number
    return ",".join(said)


def _by_name(inventories: Sequence[Inventory]) -> dict[str, list[Component]]:
    found: dict[str, list[Component]] = {}
    for inventory in inventories:
        for component in inventory.components:
            found.setdefault(component.name, []).append(component)
    return found


def _unlike(components: Sequence[Component]) -> list[Component]:
    """One component of each kind that `diff_components` and `_cut` can tell apart."""
    layouts: dict[int, tuple[Any, ...]] = {}
    found: dict[tuple[Any, ...], Component] = {}
    for component in components:
        buffers = []
        for buffer in component.buffers:
            layout = layouts.get(id(buffer.layout))
            if layout is None:
                given = buffer.layout
                spare = tuple((slab.stop, slab.optional) for slab in given.slabs) if _spares(given) else ()
                layout = (given.dtype, given.itemsize, given.shape, given.axes, given.position, given.blocks, spare)
                layouts[id(given)] = layout
            buffers.append((buffer.name, buffer.count > 0, buffer.layer, buffer.scale, layout))
        key = (
            component.type,
            component.format,
            component.window,
            component.group,
            component.keep,
            component.page,
            component.partition.kind,
            component.partition.block,
            tuple(buffers),
        )
        found.setdefault(key, component)
    return list(found.values())


def _spares(layout: Layout) -> bool:
    return any(slab.optional for slab in layout.slabs)


def _renamed(here: dict[str, list[Component]], there: dict[str, list[Component]]) -> set[str]:
    """Optional components of one type that each side has under a name that the other side lacks.

    One side may lack an optional component. If each side has one that the other lacks, it is the same component under
    two names, which is a mistake.
    """
    only = [
        {(each.kind.name, name) for name, components in mine.items() if name not in other for each in components}
        for mine, other in ((here, there), (there, here))
    ]
    both = {kind for kind, _ in only[0]} & {kind for kind, _ in only[1]}
    return {name for side in only for kind, name in side if kind in both}


def _buffers(name: str, ours: Sequence[Component], theirs: Sequence[Component]) -> list[Difference]:
    here = {buffer.name: buffer for component in ours for buffer in component.buffers}
    there = {buffer.name: buffer for component in theirs for buffer in component.buffers}
    only = here.keys() ^ there.keys()
    if not only:
        return []
    # One side may lack whole layers of optional buffers. But if each side has what the other lacks, or both have a part
    # of a layer, it is one draft model under two names, of which only a part would move.
    apart = bool(here.keys() - there.keys()) and bool(there.keys() - here.keys())
    common = {
        here[label].layer for label in here.keys() & there.keys() if here[label].optional or there[label].optional
    }
    common.discard(None)
    found = []
    for label in sorted(only):
        buffer = here.get(label) or there[label]
        if apart or not buffer.optional or buffer.layer in common:
            found.append(_presence(f"{name}/{label}", label in here))
    return found


def _cut(ours: Component, theirs: Component) -> list[Difference]:
    """Buffers whose rows or items would be cut by the other side's pages, or by the way positions are dealt out."""
    if not ours.page or not theirs.page:
        return []
    granule = granule_of(theirs, ours)
    known = {buffer.name for buffer in theirs.buffers if buffer.count}
    dealt = "cyclic" in (ours.partition.kind, theirs.partition.kind)
    return [
        Difference(f"{ours.name}/{buffer.name}: {_unit(ours, buffer)}", _dealt(ours), _dealt(theirs))
        for buffer in ours.buffers
        if buffer.count
        and buffer.name in known
        and (dealt or ours.ratio(buffer))  # `diff_components` reports unequal pages without an axis
        and granule % (ours.ratio(buffer) or ours.page)
    ]


def _unit(component: Component, buffer: Buffer) -> str:
    ratio = component.ratio(buffer)
    return f"a row of {ratio} positions would be cut" if ratio else "an item without an axis of positions would be cut"


def _dealt(component: Component) -> str:
    partition = component.partition
    pages = f"pages of {component.page}"
    return f"{pages}, positions dealt out in blocks of {partition.block}" if partition.kind == "cyclic" else pages


def _presence(path: str, ours: bool) -> Difference:
    return Difference(path, "present" if ours else "absent", "absent" if ours else "present")
