"""Formulas of today's engines that are known wrong: the oracle that ours pass catches each of them.

Every formula is written as its engine has it, in engine terms: flat lists of ``(address, item)``, one per buffer, keys
of all layers before the values. Beside it stands the formula that is right, to show that it is not the harness which
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from .carry import carry, should_be
from .ranks import Rank, instance
from .scene import Lay, Part, Pool, Scene, Side, need

Copies = Iterator[tuple[int, int, int]]
"""Byte offsets in the source's and in the destination's memory, and bytes."""
Formula = Callable[[Scene, Rank, Rank], Copies]

PAGE, TOKENS = 4, 38
GROUPS = ((4, 4), (4, 4), (8, 8))
"""Blocks of convolution channels."""
STATE_HEADS = 4


class Entry(NamedTuple):
    """One buffer as engines know it."""

    name: str
    at: int
    item: int

    @property
    def layer(self) -> int:
        return int(self.name.split(".")[1])


def keys(depth: int = 4, *, heads: int = 2, dims: tuple[int, int] = (2, 2), draft: tuple[int, ...] = ()) -> Pool:
    parts = [
        Part(f"layers.{n}.{label}", n, (heads, dim), heads=((heads, heads),), draft=n in draft)
        for n in (*range(depth), *draft)
        for label, dim in zip("kv", dims, strict=True)
    ]
    return Pool("kv", "kv", "suffix", "kv", tuple(parts))


def states() -> Pool:
    parts = []
    for n in (1, 2):
        parts.append(Part(f"layers.{n}.conv", n, (16, 3), heads=GROUPS))
        parts.append(Part(f"layers.{n}.ssm", n, (STATE_HEADS, 2, 3), heads=((STATE_HEADS, STATE_HEADS),)))
    return Pool("mamba", "mamba", "request", "mamba", tuple(parts))


def windows() -> Pool:
    return replace(keys(3), name="swa", type="swa", coverage="window", build="window", window=16)


def scene_of(
    pool: Pool,
    *,
    tp: tuple[int, int] = (1, 1),
    cuts: tuple[int, ...] = (4,),
    depth: int = 4,
    padded: bool = False,
    prefix: int = 0,
) -> Scene:
    lay = Lay(0 if pool.coverage == "request" else PAGE)
    side = Side(
        tp=tp[0], shards=1, cuts=cuts, lays={pool.name: lay}, style="separate", padded=False, one_region=False,
        axes=True, slot=1,
    )  # fmt: skip
    target = replace(side, tp=tp[1], cuts=(depth,), padded=padded)
    return Scene((pool,), side, target, TOKENS, prefix, prefix_known=True, chunks=(20,), max_blocks=64, seed=7)


def entries(rank: Rank) -> list[Entry]:
    """Keys of all layers, then values; drafts behind both; or tensor by tensor."""
    depth = rank.side.cuts[-1]
    found = [Entry(label, placed.offset, placed.strides[0]) for (_, label), placed in rank.placed.items()]
    return sorted(found, key=lambda entry: (entry.layer >= depth, entry.name.split(".")[2], entry.layer))


def ids(rank: Rank) -> list[int]:
    """The items of the request: prefill has all that decode could need, decode has what must arrive."""
    (pool,) = rank.scene.pools
    prefix = 0 if rank.side is rank.scene.source else rank.scene.prefix
    return rank.keeping[pool.name].ids(*need(pool, rank.scene.tokens, prefix))


def holds(scene: Scene, formula: Formula) -> bool:
    """Whether a formula leaves every decode rank with the bytes that it should have, and nothing else changed."""
    rng = np.random.default_rng(scene.seed)
    sources, targets = instance(scene, scene.source, "prefill", rng), instance(scene, scene.target, "decode", rng)
    good = True
    for target in targets:
        image, _ = should_be(scene, target, sources, target.space.data.copy())
        for source in sources:
            for s, t, n in formula(scene, source, target):
                if t + n > len(target.space.data) or s + n > len(source.space.data):
                    return False
                target.space.data[t : t + n] = source.space.data[s : s + n]
        good = good and np.array_equal(target.space.data, image)
    return good


def pages(pairs: list[tuple[Entry, Entry]], source: Rank, target: Rank) -> Copies:
    """Whole items, each buffer with its own item on its own side."""
    for ours, theirs in pairs:
        for a, b in zip(ids(source), ids(target), strict=True):
            yield ours.at + a * ours.item, theirs.at + b * theirs.item, ours.item


def split_in_half(scene: Scene, source: Rank, target: Rank) -> Copies:
    """Finds values at an offset that is guessed from the length of the destination's list (§6.2)."""
    ours, theirs = entries(source), entries(target)
    n, half = len(ours) // 2, len(theirs) // 2
    start = ours[0].layer
    values = n * (half // n) if half % n else half
    found = [(ours[i], theirs[start + i]) for i in range(n)]
    found += [(ours[n + i], theirs[values + start + i]) for i in range(n)]
    yield from pages(found, source, target)


def by_name(scene: Scene, source: Rank, target: Rank) -> Copies:
    named = {entry.name: entry for entry in entries(target)}
    yield from pages([(entry, named[entry.name]) for entry in entries(source)], source, target)


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
    case = scene_of(keys(depth, draft=draft), cuts=cuts, depth=depth)
    assert holds(case, split_in_half) is right
    assert holds(case, by_name)
    assert carry(case)["kv"]


def by_descriptors(count: Callable[[int, int, int], int]) -> Formula:
    """Tokens cut into groups of heads, found in a list that was computed ahead (§4.5)."""

    def formula(scene: Scene, source: Rank, target: Rank) -> Copies:
        total, wide, narrow = scene.pools[0].parts[0].shape[0], scene.target.tp, scene.source.tp
        d, p = target.inventory.rank, source.inventory.rank
        if p != d // (wide // narrow):
            return
        mine, theirs = max(1, total // narrow), max(1, total // wide)
        groups = count(total, narrow, wide)
        offset = d // max(1, wide // total) * theirs % mine
        size = PAGE
        for ours, there in zip(entries(source), entries(target), strict=True):
            head = ours.item // size // mine
            slots = 1 + max(ids(source))
            nbytes = theirs * head
            descriptors = [
                ours.at + page * ours.item + token * mine * head + group * nbytes
                for page in range(slots)
                for token in range(size)
                for group in range(groups)
            ]
            for a, b in zip(ids(source), ids(target), strict=True):
                for token in range(size):
                    index = a * size * groups + token * groups + offset // theirs
                    for at in descriptors[index : index + 1]:
                        yield at, there.at + b * there.item + token * nbytes, nbytes

    return formula


@pytest.mark.parametrize(
    ("heads", "source", "target", "right"),
    [(8, 2, 4, True), (2, 1, 4, True), (2, 4, 8, False), (1, 2, 4, False), (4, 8, 16, False)],
)
def test_counting_groups_of_heads_without_the_heads_of_prefill(
    heads: int, source: int, target: int, right: bool
) -> None:
    case = scene_of(keys(heads=heads), tp=(source, target))
    assert holds(case, by_descriptors(lambda t, s, d: d // s // max(1, d // t))) is right
    assert holds(case, by_descriptors(lambda t, s, d: max(1, t // s) // max(1, t // d)))
    assert carry(case)["kv"]


def items_of(which: Callable[[list[Entry], int], int]) -> Formula:
    """Whole pages, with one buffer's item taken for another's."""

    def formula(scene: Scene, source: Rank, target: Rank) -> Copies:
        ours, theirs = entries(source), entries(target)
        for number, (mine, there) in enumerate(zip(ours, theirs, strict=True)):
            one, other = which(ours, number), which(theirs, number)
            for a, b in zip(ids(source), ids(target), strict=True):
                yield mine.at + a * one, there.at + b * other, one

    return formula


@pytest.mark.parametrize(("dims", "right"), [((2, 2), True), ((3, 2), False), ((2, 3), False)])
def test_taking_the_item_of_keys_for_that_of_values(dims: tuple[int, int], right: bool) -> None:
    case = scene_of(keys(dims=dims))
    assert holds(case, items_of(lambda listed, number: listed[0].item)) is right
    assert holds(case, items_of(lambda listed, number: listed[number].item))
    assert carry(case)["kv"]


def sources_stride(scene: Scene, source: Rank, target: Rank) -> Copies:
    for ours, theirs in zip(entries(source), entries(target), strict=True):
        for a, b in zip(ids(source), ids(target), strict=True):
            yield ours.at + a * ours.item, theirs.at + b * ours.item, ours.item


def test_taking_the_sources_item_for_the_destinations_stride() -> None:
    assert holds(scene_of(keys()), sources_stride)
    case = scene_of(keys(), padded=True)
    assert not holds(case, sources_stride)
    assert holds(case, by_name)
    assert carry(case)["kv"]


def sliced(groups: list[int]) -> Formula:
    """Slices of a slot's channels, sub-block by sub-block (§5.2); recurrent states are one block of heads."""

    def formula(scene: Scene, source: Rank, target: Rank) -> Copies:
        wide, narrow = scene.source.tp, scene.target.tp
        p, d = source.inventory.rank, target.inventory.rank
        if p // max(1, wide // narrow) != d // max(1, narrow // wide):
            return
        for ours, theirs in zip(entries(source), entries(target), strict=True):
            blocks = groups if ours.name.endswith("conv") else [STATE_HEADS]
            unit = ours.item * wide // sum(blocks)
            a = ids(source)[0] * ours.item + ours.at
            b = ids(target)[0] * theirs.item + theirs.at
            for width in blocks:
                mine, there = width // wide, width // narrow
                skip_a = d * there % mine if wide < narrow else 0
                skip_b = p % (wide // narrow) * mine if wide > narrow else 0
                yield a + skip_a * unit, b + skip_b * unit, min(mine, there) * unit
                a, b = a + mine * unit, b + there * unit

    return formula


@pytest.mark.parametrize(("source", "target", "right"), [(2, 2, True), (1, 2, False), (2, 1, False), (4, 2, False)])
def test_one_slice_across_a_grouped_convolution(source: int, target: int, right: bool) -> None:
    case = scene_of(states(), tp=(source, target))
    assert holds(case, sliced([sum(width for width, _ in GROUPS)])) is right
    assert holds(case, sliced([width for width, _ in GROUPS]))
    assert carry(case)["mamba"]


def whole_slots(scene: Scene, source: Rank, target: Rank) -> Copies:
    """What remains of slicing when the dimensions are missing: the source's whole slot, however long."""
    wide, narrow = scene.source.tp, scene.target.tp
    if source.inventory.rank // max(1, wide // narrow) == target.inventory.rank // max(1, narrow // wide):
        for ours, theirs in zip(entries(source), entries(target), strict=True):
            a, b = ids(source)[0] * ours.item, ids(target)[0] * theirs.item
            yield ours.at + a, theirs.at + b, ours.item


@pytest.mark.parametrize(("source", "target", "right"), [(2, 2, True), (1, 2, False), (2, 1, False)])
def test_whole_slots_where_dimensions_are_missing(source: int, target: int, right: bool) -> None:
    case = scene_of(states(), tp=(source, target))
    assert holds(case, whole_slots) is right
    assert carry(case)["mamba"]


def trimmed(end: bool) -> Formula:
    """The longer of two lists of window pages, cut to the shorter one (§3)."""

    def formula(scene: Scene, source: Rank, target: Rank) -> Copies:
        theirs, ours = ids(source), ids(target)
        n = min(len(theirs), len(ours))
        kept = (theirs[-n:], ours[-n:]) if end else (theirs[:n], ours[:n])
        for mine, there in zip(entries(source), entries(target), strict=True):
            for a, b in zip(*kept, strict=True):
                yield mine.at + a * mine.item, there.at + b * there.item, mine.item

    return formula


@pytest.mark.parametrize(("prefix", "right"), [(0, True), (20, True), (28, False), (36, False)])
def test_trimming_windows_from_the_head(prefix: int, right: bool) -> None:
    case = scene_of(windows(), prefix=prefix)
    assert holds(case, trimmed(end=False)) is right
    assert holds(case, trimmed(end=True))
    assert carry(case)["swa"]
