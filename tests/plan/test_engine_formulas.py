"""Formulas of today's engines that are known wrong: the oracle that ours pass catches each of them.

Every formula is written as its engine has it, in engine terms: flat lists of ``(address, item)``, one per buffer, keys
of all layers before the values. Beside it stands the formula that is right, to show that it is not the harness which
fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from .carry import carry, should_be
from .case import Case, Model, Side
from .engine import Rank, instance

Copies = Iterator[tuple[int, int, int]]
"""Byte offsets in the source's and in the destination's memory, and bytes."""
Formula = Callable[[Case, Rank, Rank], Copies]

MODEL = Model(
    kv=(),
    mla=(),
    swa=(),
    dsa=(),
    mamba=(),
    aux=False,
    depth=4,
    heads=2,
    window_heads=2,
    window=16,
    dims=(2, 2),
    groups=((4, 4), (4, 4), (8, 8)),
    kernel=3,
    state_heads=4,
    dtype="uint8",
)
SIDE = Side(
    tp=1,
    cuts=(4,),
    page=4,
    window_page=4,
    order="nhd",
    style="separate",
    padded=False,
    one_region=False,
    transposed=False,
    shared=(),
)
CASE = Case(
    model=MODEL,
    source=SIDE,
    target=SIDE,
    tokens=38,
    prefix=0,
    prefix_known=True,
    chunks=(10,),
    layer_cuts=(),
    max_blocks=64,
    seed=7,
)


class Entry(NamedTuple):
    """One buffer as engines know it."""

    name: str
    at: int
    item: int

    @property
    def layer(self) -> int:
        return int(self.name.split(".")[1])


def case_of(*, source: dict[str, object], target: dict[str, object], model: dict[str, object], prefix: int = 0) -> Case:
    changed = dataclasses.replace(MODEL, **model)  # type: ignore[arg-type]
    layers = {"cuts": (changed.depth,)}
    sides = [dataclasses.replace(SIDE, **{**layers, **each}) for each in (source, target)]  # type: ignore[arg-type]
    return dataclasses.replace(CASE, model=changed, source=sides[0], target=sides[1], prefix=prefix)


def entries(rank: Rank, component: str) -> list[Entry]:
    """Keys of all layers, then values; drafts behind both; or tensor by tensor."""
    depth = rank.case.model.depth
    found = [
        Entry(piece.name, piece.placed.offset, piece.placed.strides[0])
        for piece in rank.pieces
        if piece.component == component
    ]
    return sorted(found, key=lambda entry: (entry.layer >= depth, entry.name.split(".")[2], entry.layer))


def holds(case: Case, formula: Formula) -> bool:
    """Whether a formula leaves every decode rank with the bytes that it should have, and nothing else changed."""
    rng = np.random.default_rng(case.seed)
    sources, targets = instance(case, case.source, "prefill", rng), instance(case, case.target, "decode", rng)
    good = True
    for target in targets:
        image, _ = should_be(case, target, sources, target.space.data.copy())
        for source in sources:
            for s, t, n in formula(case, source, target):
                if t + n > len(target.space.data) or s + n > len(source.space.data):
                    return False
                target.space.data[t : t + n] = source.space.data[s : s + n]
        good = good and np.array_equal(target.space.data, image)
    return good


def pages(component: str, pairs: list[tuple[Entry, Entry]], source: Rank, target: Rank) -> Copies:
    """Whole items, each buffer with its own item on its own side."""
    for ours, theirs in pairs:
        for a, b in zip(source.ids[component], target.ids[component], strict=True):
            yield ours.at + int(a) * ours.item, theirs.at + int(b) * theirs.item, ours.item


def split_in_half(case: Case, source: Rank, target: Rank) -> Copies:
    """Finds values at an offset that is guessed from the length of the destination's list (§6.2)."""
    ours, theirs = entries(source, "kv"), entries(target, "kv")
    n, half = len(ours) // 2, len(theirs) // 2
    start = ours[0].layer
    values = n * (half // n) if half % n else half
    found = [(ours[i], theirs[start + i]) for i in range(n)]
    found += [(ours[n + i], theirs[values + start + i]) for i in range(n)]
    yield from pages("kv", found, source, target)


def by_name(case: Case, source: Rank, target: Rank) -> Copies:
    named = {entry.name: entry for entry in entries(target, "kv")}
    yield from pages("kv", [(entry, named[entry.name]) for entry in entries(source, "kv")], source, target)


@pytest.mark.parametrize(
    ("depth", "cuts", "draft", "right"),
    [
        pytest.param(4, (2, 4), (), True, id="even stages"),
        pytest.param(5, (3, 5), (), False, id="stages of 3 and 2"),
        pytest.param(6, (1, 2, 6), (), False, id="stages of 1, 1 and 4"),
        pytest.param(4, (4,), (4,), True, id="a draft of fewer layers than the stage"),
        pytest.param(4, (4,), (4, 5, 6, 7), False, id="a draft of as many layers as the stage"),
        pytest.param(2, (1, 2), (2,), False, id="stages of 1, and a draft of 1"),
    ],
)
def test_guessing_where_values_begin(depth: int, cuts: tuple[int, ...], draft: tuple[int, ...], right: bool) -> None:
    case = case_of(model={"kv": tuple(range(depth)), "depth": depth, "draft": draft}, source={"cuts": cuts}, target={})
    assert holds(case, split_in_half) is right
    assert holds(case, by_name)
    assert carry(case).nbytes["kv"]


def by_descriptors(count: Callable[[int, int, int], int]) -> Formula:
    """Tokens cut into groups of heads, found in a list that was computed ahead (§4.5)."""

    def formula(case: Case, source: Rank, target: Rank) -> Copies:
        total, wide, narrow = case.model.heads, case.target.tp, case.source.tp
        d, p = target.inventory.rank, source.inventory.rank
        if p != d // (wide // narrow):
            return
        mine, theirs = max(1, total // narrow), max(1, total // wide)
        groups = count(total, narrow, wide)
        offset = d // max(1, wide // total) * theirs % mine
        size = case.source.page
        for ours, there in zip(entries(source, "kv"), entries(target, "kv"), strict=True):
            head = ours.item // size // mine
            slots = 1 + int(max(source.ids["kv"]))
            nbytes = theirs * head
            descriptors = [
                ours.at + page * ours.item + token * mine * head + group * nbytes
                for page in range(slots)
                for token in range(size)
                for group in range(groups)
            ]
            for a, b in zip(source.ids["kv"], target.ids["kv"], strict=True):
                for token in range(size):
                    index = int(a) * size * groups + token * groups + offset // theirs
                    for at in descriptors[index : index + 1]:
                        yield at, there.at + int(b) * there.item + token * nbytes, nbytes

    return formula


@pytest.mark.parametrize(
    ("heads", "source", "target", "right"),
    [(8, 2, 4, True), (2, 1, 4, True), (2, 4, 8, False), (1, 2, 4, False), (4, 8, 16, False)],
)
def test_counting_groups_of_heads_without_the_heads_of_prefill(
    heads: int, source: int, target: int, right: bool
) -> None:
    case = case_of(model={"kv": (0, 3), "heads": heads}, source={"tp": source}, target={"tp": target})
    assert holds(case, by_descriptors(lambda t, s, d: d // s // max(1, d // t))) is right
    assert holds(case, by_descriptors(lambda t, s, d: max(1, t // s) // max(1, t // d)))
    assert carry(case).nbytes["kv"]


def items_of(which: Callable[[list[Entry], int], int]) -> Formula:
    """Whole pages, with one buffer's item taken for another's."""

    def formula(case: Case, source: Rank, target: Rank) -> Copies:
        ours, theirs = entries(source, "kv"), entries(target, "kv")
        for number, (mine, there) in enumerate(zip(ours, theirs, strict=True)):
            one, other = which(ours, number), which(theirs, number)
            for a, b in zip(source.ids["kv"], target.ids["kv"], strict=True):
                yield mine.at + int(a) * one, there.at + int(b) * other, one

    return formula


@pytest.mark.parametrize(("dims", "right"), [((2, 2), True), ((3, 2), False), ((2, 3), False)])
def test_taking_the_item_of_keys_for_that_of_values(dims: tuple[int, int], right: bool) -> None:
    case = case_of(model={"kv": (0, 1), "dims": dims}, source={}, target={})
    assert holds(case, items_of(lambda listed, number: listed[0].item)) is right
    assert holds(case, items_of(lambda listed, number: listed[number].item))
    assert carry(case).nbytes["kv"]


def sources_stride(case: Case, source: Rank, target: Rank) -> Copies:
    for ours, theirs in zip(entries(source, "kv"), entries(target, "kv"), strict=True):
        for a, b in zip(source.ids["kv"], target.ids["kv"], strict=True):
            yield ours.at + int(a) * ours.item, theirs.at + int(b) * ours.item, ours.item


def test_taking_the_sources_item_for_the_destinations_stride() -> None:
    case = case_of(model={"kv": (0, 1)}, source={}, target={})
    assert holds(case, sources_stride)
    case = case_of(model={"kv": (0, 1)}, source={}, target={"padded": True})
    assert not holds(case, sources_stride)
    assert holds(case, by_name)
    assert carry(case).nbytes["kv"]


def sliced(groups: Callable[[Case], list[int]]) -> Formula:
    """Slices of a slot's channels, sub-block by sub-block (§5.2); recurrent states are one block of heads."""

    def formula(case: Case, source: Rank, target: Rank) -> Copies:
        wide, narrow = case.source.tp, case.target.tp
        p, d = source.inventory.rank, target.inventory.rank
        if p // max(1, wide // narrow) != d // max(1, narrow // wide):
            return
        for ours, theirs in zip(entries(source, "mamba"), entries(target, "mamba"), strict=True):
            blocks = groups(case) if ours.name.endswith("conv") else [case.model.state_heads]
            unit = ours.item * wide // sum(blocks)
            a = int(source.ids["mamba"][0]) * ours.item + ours.at
            b = int(target.ids["mamba"][0]) * theirs.item + theirs.at
            for width in blocks:
                mine, there = width // wide, width // narrow
                skip_a = d * there % mine if wide < narrow else 0
                skip_b = p % (wide // narrow) * mine if wide > narrow else 0
                yield a + skip_a * unit, b + skip_b * unit, min(mine, there) * unit
                a, b = a + mine * unit, b + there * unit

    return formula


@pytest.mark.parametrize(("source", "target", "right"), [(2, 2, True), (1, 2, False), (2, 1, False), (4, 2, False)])
def test_one_slice_across_a_grouped_convolution(source: int, target: int, right: bool) -> None:
    case = case_of(model={"mamba": (1, 2)}, source={"tp": source}, target={"tp": target})
    assert holds(case, sliced(lambda case: [sum(width for width, _ in case.model.groups)])) is right
    assert holds(case, sliced(lambda case: [width for width, _ in case.model.groups]))
    assert carry(case).nbytes["mamba"]


def whole_slots(case: Case, source: Rank, target: Rank) -> Copies:
    """What remains of slicing when the dimensions are missing: the source's whole slot, however long."""
    wide, narrow = case.source.tp, case.target.tp
    if source.inventory.rank // max(1, wide // narrow) == target.inventory.rank // max(1, narrow // wide):
        for ours, theirs in zip(entries(source, "mamba"), entries(target, "mamba"), strict=True):
            a, b = int(source.ids["mamba"][0]) * ours.item, int(target.ids["mamba"][0]) * theirs.item
            yield ours.at + a, theirs.at + b, ours.item


@pytest.mark.parametrize(("source", "target", "right"), [(2, 2, True), (1, 2, False), (2, 1, False)])
def test_whole_slots_where_dimensions_are_missing(source: int, target: int, right: bool) -> None:
    case = case_of(model={"mamba": (1, 2)}, source={"tp": source}, target={"tp": target})
    assert holds(case, whole_slots) is right
    assert carry(case).nbytes["mamba"]


def trimmed(end: bool) -> Formula:
    """The longer of two lists of window pages, cut to the shorter one (§3)."""

    def formula(case: Case, source: Rank, target: Rank) -> Copies:
        theirs, ours = source.ids["swa"].tolist(), target.ids["swa"].tolist()
        n = min(len(theirs), len(ours))
        kept = (theirs[-n:], ours[-n:]) if end else (theirs[:n], ours[:n])
        for mine, there in zip(entries(source, "swa"), entries(target, "swa"), strict=True):
            for a, b in zip(*kept, strict=True):
                yield mine.at + a * mine.item, there.at + b * there.item, mine.item

    return formula


@pytest.mark.parametrize(("prefix", "right"), [(0, True), (20, True), (28, False), (36, False)])
def test_trimming_windows_from_the_head(prefix: int, right: bool) -> None:
    case = case_of(model={"swa": (0, 2)}, source={}, target={}, prefix=prefix)
    assert holds(case, trimmed(end=False)) is right
    assert holds(case, trimmed(end=True))
    assert carry(case).nbytes["swa"]
