"""Decode instances that were spoilt in one place, against an oracle that paints what each side holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelink import plan
from statelink.errors import MismatchError

from .engine import instance
from .strategies import PROFILE, at_scale, cases

if TYPE_CHECKING:
    from statelink.state import Inventory

    from .case import Case

SPOILT = ("a rank is missing", "a rank says what another says", "a rank lacks a buffer", "a rank lacks a component")
TOPOLOGIES = ("equal widths", "narrow to wide", "replicated heads", "stages to stages")
EXAMPLES = 5
Masks = dict[tuple[str, str], npt.NDArray[np.bool_]]


def painted(ranks: Sequence[Inventory]) -> Masks:
    """Which elements of one position of each buffer some rank holds."""
    found: Masks = {}
    for rank in ranks:
        for component in rank.components:
            for buffer in component.buffers:
                layout = buffer.layout
                if not buffer.count:
                    continue
                axes = [axis for axis in range(len(layout.shape)) if axis != layout.position]
                shape = [layout.shape[axis] for axis in axes]
                mask = found.setdefault((component.name, buffer.name), np.zeros(shape, np.bool_))
                for slab in layout.slabs:
                    mask[tuple(slice(slab.start[axis], slab.stop[axis]) for axis in axes)] = True
    return found


def spoil(draw: Any, ranks: list[Inventory], how: str) -> list[Inventory]:
    """The same instance with one mistake in it."""
    victim = draw(st.integers(0, len(ranks) - 1))
    if how == "a rank is missing":
        kept = [rank for number, rank in enumerate(ranks) if number != victim]
        return [msgspec.structs.replace(rank, rank=n, ranks=len(kept)) for n, rank in enumerate(kept)]
    one = ranks[victim]
    if not one.components:
        return ranks
    if how == "a rank says what another says":
        other = ranks[draw(st.integers(0, len(ranks) - 1))]
        changed = msgspec.structs.replace(other, rank=victim)
    else:
        place = draw(st.integers(0, len(one.components) - 1))
        component = one.components[place]
        buffers = component.buffers
        gone = draw(st.integers(0, len(buffers) - 1))
        rest = tuple(buffer for number, buffer in enumerate(buffers) if number != gone)
        whole = how == "a rank lacks a component" or not rest
        new = () if whole else (msgspec.structs.replace(component, buffers=rest),)
        changed = msgspec.structs.replace(one, components=(*one.components[:place], *new, *one.components[place + 1 :]))
    return [changed if number == victim else rank for number, rank in enumerate(ranks)]


@at_scale
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_is_accepted_has_a_place_for_everything(topology: str, how: str, scale: int) -> None:
    counted: Counter[str] = Counter()

    @settings(PROFILE, max_examples=scale * EXAMPLES)
    @given(st.data(), cases(topology, "kv"))
    def check(data: st.DataObject, case: Case) -> None:
        rng = np.random.default_rng(case.seed)
        sources = [rank.inventory for rank in instance(case, case.source, "prefill", rng)]
        targets = [rank.inventory for rank in instance(case, case.target, "decode", rng)]
        plan.match(sources, targets)
        spoilt = spoil(data.draw, targets, how)
        if not spoilt:
            return
        held, there = painted(sources), painted(spoilt)
        lost = [name for name, mask in held.items() if name in there and (mask & ~there[name]).any()]
        lost += [name for name in held.keys() - there.keys() if name[0] != "dsa"]  # layers may share an index
        try:
            plan.match(sources, spoilt)
        except MismatchError:
            counted["refused"] += 1
        else:
            assert not lost, f"nobody on decode holds all of {lost}"
            counted["accepted"] += 1

    check()
    assert counted["refused"] >= scale
