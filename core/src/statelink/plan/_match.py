"""Pairing two instances by name, in both directions."""

from __future__ import annotations

from collections.abc import Sequence

from statelink.errors import MismatchError
from statelink.state import Buffer, Component, Difference, Inventory
from statelink.state._diff import diff_components

from ._pairing import granule_of

__all__ = ["differences", "match"]

SHOWN = 12


def differences(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> list[Difference]:
    """Every field on which a source and a destination instance disagree; the destination's value first.

    Components are compared over whole instances: a pipeline stage need not hold what another one does, but each
    component, and each buffer that is not optional, must exist on both sides.
    """
    found: dict[Difference, None] = {}
    for target in targets:
        for source in sources:
            if source.model != target.model:
                found[Difference("model", repr(target.model), repr(source.model))] = None
    here, there = _by_name(targets), _by_name(sources)
    for name in sorted(here.keys() | there.keys()):
        if name not in here or name not in there:
            if all(buffer.optional for each in (here.get(name) or there[name]) for buffer in each.buffers):
                continue
            kinds = (here.get(name) or there[name])[0].kind.name
            path = f"component {name} (type {kinds})"
            found[_presence(path, name in here)] = None
            continue
        seen: set[tuple[int, int]] = set()
        for ours in here[name]:
            for theirs in there[name]:
                if (id(ours), id(theirs)) not in seen:
                    seen.add((id(ours), id(theirs)))
                    found.update(dict.fromkeys(diff_components(ours, theirs)))
                    found.update(dict.fromkeys(_cut(ours, theirs)))
        found.update(dict.fromkeys(_buffers(name, here[name], there[name])))
    return list(found)


def match(sources: Sequence[Inventory], targets: Sequence[Inventory]) -> None:
    """Check that every destination can be served by these sources, as far as names and geometry tell.

    Raises:
        MismatchError: They differ; the message lists the fields, the destination's value first.
    """
    found = differences(sources, targets)
    if found:
        lines = [f"{each.path}: {each.ours} on decode, {each.theirs} on prefill" for each in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"and {len(found) - SHOWN} more")
        raise MismatchError(
            "prefill and decode do not describe the same state",
            cause="; ".join(lines),
            hint="both engines must be configured for the same model, cache dtype and layout",
            prefill=sources[0].instance,
            decode=targets[0].instance,
        )


def _by_name(inventories: Sequence[Inventory]) -> dict[str, list[Component]]:
    found: dict[str, list[Component]] = {}
    for inventory in inventories:
        for component in inventory.components:
            found.setdefault(component.name, []).append(component)
    return found


def _buffers(name: str, ours: Sequence[Component], theirs: Sequence[Component]) -> list[Difference]:
    here = {buffer.name: buffer for component in ours for buffer in component.buffers}
    there = {buffer.name: buffer for component in theirs for buffer in component.buffers}
    # What is optional may be missing, but not all of it: two descriptions of one draft that have no buffer in common
    # would let decode go on without a byte of it.
    apart = not here.keys() & there.keys()
    return [
        _presence(f"{name}/{label}", label in here)
        for label in sorted(here.keys() ^ there.keys())
        if apart or not (here.get(label) or there[label]).optional
    ]


def _cut(ours: Component, theirs: Component) -> list[Difference]:
    """Buffers whose rows or items would be cut: by pages of the other side, or by how positions are dealt out."""
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
        and (dealt or ours.ratio(buffer))  # unequal pages without an axis are a difference of their own
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
