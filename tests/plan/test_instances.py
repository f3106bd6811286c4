"""What can only be seen once every rank of an instance is known: who is whose replica, and what has no place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from statelink import plan, state
from statelink.errors import MismatchError, StateError
from statelink.state import Described, Inventory, Partition

from .small import keys, pointer

Parts = Sequence[Described]


def instance(name: str, *ranks: Parts, axes: Sequence[dict[str, tuple[int, int]]] = ()) -> list[Inventory]:
    return [
        state.describe(name, parts, rank=rank, ranks=len(ranks), axes=axes[rank] if axes else None)
        for rank, parts in enumerate(ranks)
    ]


def kv(rank: int = 0, width: int = 1, layers: Sequence[int] = (0,), **fields: Any) -> Described:
    return keys(layers, 4, 2, 4 // width, 3, heads=4, tp=(rank, width), **fields)


def ring(rank: int = 0, width: int = 1, heads: int = 4, **fields: Any) -> Described:
    """A ring of keys and values of a sliding window, by head."""
    arrays = {part: pointer(10 + n, 3, 8, max(1, heads // width), 2) for n, part in enumerate("kv")}
    return state.ring_rows({0: arrays}, type="swa_ring", window=4, heads=heads, tp=(rank, width), **fields)


def row(**fields: Any) -> Described:
    return state.aux_rows({"row": pointer(20, 3, 5)}, **fields)


def latents(index: int, size: int, **fields: Any) -> Described:
    return state.mla_pages({0: pointer(30, 4, 2, 3)}, partition=Partition("cyclic", size, index, 2), **fields)


def lacking(made: Described, name: str) -> Described:
    """The same without one buffer."""
    kept = tuple(buffer for buffer in made.component.buffers if buffer.name != name)
    return made._replace(component=msgspec.structs.replace(made.component, buffers=kept))


BOTH = [kv(0, 2)], [kv(1, 2)]
FULL = instance("p", [kv()])
POSITIONS = instance("p", [state.mla_pages({0: pointer(30, 4, 2, 3)})])


UNCOVERED: list[tuple[str, list[Inventory], list[Inventory], str]] = [
    ("one of two ranks", FULL, instance("d", [kv(1, 2)]), "buffer 'layers.0.k' .*: head \\[0, 2\\), at any position"),
    (
        "a rank lacks values",
        instance("p", *BOTH),
        instance("d", [kv(0, 2)], [lacking(kv(1, 2), "layers.0.v")]),
        "decode rank 1 lacks buffer 'layers.0.v' .*it has 'layers.0.k' of the same layer",
    ),
    (
        "one rank lacks a layer",
        instance("p", [kv(0, 2, (0, 1))], [kv(1, 2, (0, 1))]),
        instance("d", [kv(0, 2, (0, 1))], [kv(1, 2)]),
        "buffer 'layers.1.k' .*: head \\[2, 4\\), at any position",
    ),
    (
        "replicas of one half",
        FULL,
        instance("d", [kv(0, 2, replicated=True)], [kv(0, 2, replicated=True)]),
        "head \\[2, 4\\), at any position; prefill rank 0 holds it",
    ),
    ("a share of a ring", instance("p", [ring()]), instance("d", [ring(0, 2)]), "head \\[2, 4\\)"),
    (
        "a share of a state",
        instance("p", [state.mamba_slots(conv={}, ssm={0: pointer(1, 3, 4, 2)}, heads=4)]),
        instance("d", [state.mamba_slots(conv={}, ssm={0: pointer(1, 3, 1, 2)}, heads=4, tp=(2, 4))]),
        "head \\[0, 2\\)|head \\[0, 4\\)|head",
    ),
    ("positions of one rank of two", POSITIONS, instance("d", [latents(0, 2)]), "share 1 of 2 of its positions"),
    (
        "one share of positions twice",
        POSITIONS,
        instance("d", [latents(1, 2)], [latents(1, 2)]),
        "all of each item, share 0 of 2 of its positions",
    ),
    (
        "half of a draft's heads",
        instance("p", [kv(), keys([9], 4, 2, 4, 3, heads=4, name="draft", optional=True)]),
        instance("d", [kv(), keys([9], 4, 2, 2, 3, heads=4, name="draft", optional=True, tp=(0, 2))]),
        "buffer 'layers.9.k'",
    ),
]


@pytest.mark.parametrize(
    ("sources", "targets", "text"), [case[1:] for case in UNCOVERED], ids=[case[0] for case in UNCOVERED]
)
def test_what_prefill_holds_has_a_place_on_decode(
    sources: list[Inventory], targets: list[Inventory], text: str
) -> None:
    with pytest.raises(MismatchError, match=text) as caught:
        plan.match(sources, targets)
    assert caught.value.code == "mismatch.uncovered"
    assert "decode d" in str(caught.value)
    plan.match(sources, [*sources])  # a decode that is like prefill has a place for everything


def test_what_covers_each_other_matches() -> None:
    halves, quarters = instance("p", *BOTH), instance("d", *([kv(rank, 4)] for rank in range(4)))
    plan.match(halves, quarters)
    plan.match(quarters, halves)
    wide = instance("d", *([ring(rank, 8)] for rank in range(8)))  # more ranks than heads
    plan.match(instance("p", [ring()]), wide)
    plan.match(wide, instance("p", [ring()]))
    plan.match(POSITIONS, instance("d", *([latents(index, 3)] for index in range(3))))
    stages = instance("d", [kv(layers=(0, 1))], [kv(layers=(2,)), row()])
    plan.match(instance("p", [kv(layers=(0, 1, 2)), row()]), stages)
    spare = [state.whole_items({"x": pointer(1, 3, n, 2)}, type="qsa_pending", spare=n - 4) for n in (8, 4)]
    plan.match(instance("p", [spare[0]]), instance("d", [spare[1]]))


STAGES = [{"pp": (stage, 2), "tp": (0, 1)} for stage in range(2)]
CONTRADICTING: list[tuple[str, list[Inventory], str, str]] = [
    ("one tp twice", instance("x", [kv(0, 2)], [kv(0, 2)], [kv(1, 2)]), "replicas", "ranks 0 and 1 .*share 0 of 2"),
    ("all of it twice", instance("x", [kv()], [kv()]), "replicas", "all of each item; each says .* all of it"),
    ("a ring without a word", instance("x", [ring(heads=1)], [ring(heads=1)]), "replicas", "layers.0.k"),
    ("rows without a word", instance("x", [kv(0, 2)], [kv(1, 2)]), "", ""),
    ("a row without a word", instance("x", [row()], [row()]), "replicas", "ranks 0 and 1 hold .*buffer 'row'"),
    ("one of them says so", instance("x", [row()], [row(replicated=True)]), "replicas", "buffer 'row'"),
    (
        "shares that overlap",
        instance("x", [kv(0, 2)], [kv(1, 2)], [kv(0, 4)]),
        "replicas",
        "ranks 0 and 2 .*share 0 of 2 and share 0 of 4",
    ),
    (
        "stages from 0",
        instance("x", [kv(replicated=True)], [kv(replicated=True)], axes=STAGES),
        "layers",
        "layers.0.k' is on rank 0 \\(pp 0\\) and on rank 1 \\(pp 1\\)",
    ),
    (
        "sizes of an axis",
        instance("x", [kv(0, 2)], [kv(1, 2)], axes=[{"cp": (0, 2)}, {"cp": (1, 3)}]),
        "axes",
        "axis 'cp' .*rank 0 says 2, rank 1 says 3",
    ),
    (
        "an axis that one leaves out",
        instance("x", [kv(0, 2)], [kv(1, 2)], axes=[{"pp": (0, 2)}, {}]),
        "axes",
        "rank 1 does not name axis 'pp' .*rank 0 is 0 of 2 on it",
    ),
    (
        "one place twice",
        instance("x", [kv(0, 2)], [kv(1, 2)], axes=[{"cp": (1, 2)}, {"cp": (1, 2)}]),
        "axes",
        "ranks 0 and 1 are both cp 1 of 2",
    ),
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("ranks", "code", "text"), [case[1:] for case in CONTRADICTING], ids=[case[0] for case in CONTRADICTING]
)
def test_ranks_that_contradict_each_other_are_refused(side: str, ranks: list[Inventory], code: str, text: str) -> None:
    whole = instance("y", [kv(), ring(heads=1), row()])
    held = {component.name for rank in ranks for component in rank.components}
    (full,) = whole
    other = [
        state.Inventory(
            instance="y",
            regions=full.regions,
            components=tuple(each for each in full.components if each.name in held),
        )
    ]
    sides = (ranks, other) if side == "prefill" else (other, ranks)
    if not code:
        plan.match(*sides)
        return
    with pytest.raises(MismatchError, match=text) as caught:
        plan.match(*sides)
    assert caught.value.code == f"mismatch.{code}"
    assert f"{side} x" in str(caught.value)


def test_replicas_that_say_so_match() -> None:
    for parts in ([row(replicated=True)], [kv(replicated=True)], [ring(replicated=True)]):
        plan.match(instance("p", parts, parts), instance("d", parts))
    # Context-parallel ranks have windows alike; positions tell their pages apart.
    contexts = [
        [kv(rank % 2, 2, partition=Partition("contiguous", 2, rank // 2)), ring(rank % 2, 2, replicated=True)]
        for rank in range(4)
    ]
    plan.match(instance("p", *contexts), instance("d", [kv(), ring()]))


@pytest.mark.parametrize(
    "rows",
    [
        row(),
        state.ring_rows({0: {"k": pointer(10, 3, 8, 2)}}, type="swa_ring", window=4),
        state.whole_items({"x": pointer(10, 3, 8)}, type="hidden"),
        state.compressed_pages({0: {"kv": pointer(10, 4, 2, 3)}}, page=8),
        state.planar_pages({0: pointer(10, 4, 12)}, fields=[("k", 2), ("scale", 1)], name="planar"),
    ],
    ids=lambda each: each.component.name,
)
def test_rows_of_a_tp_rank_say_that_they_are_replicated(rows: Described) -> None:
    name = rows.component.name
    for parts, axes in (([kv(1, 2), rows], None), ([rows], {"tp": (1, 2)})):
        with pytest.raises(StateError, match=f"component '{name}' does not say .*\n.*replicated=True"):
            state.describe("x", parts, rank=1, ranks=2, axes=axes)
        state.describe("x", [rows], axes={"tp": (0, 1)})


def test_a_ring_holds_its_share_of_heads() -> None:
    """Formulas as engines share KV heads out: rank r of X holds r * T / X on, or head r // (X / T)."""
    for heads, width in ((4, 1), (4, 2), (4, 4), (2, 8), (8, 2)):
        for rank in range(width):
            (slab,) = ring(rank, width, heads).component.buffers[0].layout.slabs
            each = max(1, heads // width)
            first = rank * each if heads >= width else rank // (width // heads)
            assert (slab.start[0], slab.stop[0]) == (first, first + each)
    with pytest.raises(StateError, match=r"an item of the array is head 4, axis0 2; this rank's share is head 2"):
        state.ring_rows({0: {"k": pointer(1, 3, 8, 4, 2)}}, type="swa_ring", window=4, heads=4, tp=(0, 2))
    with pytest.raises(StateError, match="does not say how 2 TP ranks share its rows"):
        state.ring_rows({0: {"k": pointer(1, 3, 8, 4, 2)}}, type="swa_ring", window=4, tp=(0, 2))


def test_a_share_that_contradicts_the_axis_is_refused() -> None:
    with pytest.raises(StateError, match="'kv' and the axis 'tp' contradict each other: it holds share 0 of 2"):
        state.describe("x", [kv(0, 2)], rank=1, ranks=2, axes={"tp": (1, 2)})
    state.describe("x", [kv(0, 2)], rank=1, ranks=4, axes={"tp": (1, 4)})  # this state has a width of its own


@pytest.mark.parametrize("change", ["one k", "one layer", "the component"])
def test_a_draft_under_two_names_is_refused(change: str) -> None:
    """What is optional may be missing; a part of it, or all of it under another name, is no draft that is missing."""

    def draft(layers: Sequence[int], name: str = "draft") -> Described:
        return keys(layers, 4, 2, 4, 3, heads=4, name=name, optional=True)

    made = draft([8, 9])
    first, *rest = made.component.buffers
    renamed = (msgspec.structs.replace(first, name="layers.8.key"), *rest)
    other = {
        "one k": made._replace(component=msgspec.structs.replace(made.component, buffers=renamed)),
        "one layer": draft([8, 10]),
        "the component": draft([8, 9], "drafts"),
    }[change]
    for sides in ((made, other), (other, made)):
        prefill, decode = (instance(name, [kv(), each]) for name, each in zip("pd", sides, strict=True))
        with pytest.raises(MismatchError, match=r"draft.*present on decode, absent on prefill"):
            plan.match(prefill, decode)
    plan.match(instance("p", [kv(), made]), instance("d", [kv(), draft([8])]))
    plan.match(instance("p", [kv()]), instance("d", [kv(), made]))


@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("groups", [None, (32, 16, 16), (16, 16, 32)])
def test_blocks_of_a_convolution_are_compared(widths: tuple[int, int], groups: tuple[int, ...] | None) -> None:
    def side(name: str, width: int, blocks: tuple[int, ...] | None) -> list[Inventory]:
        arrays = {0: pointer(1, 3, 64 // width, 2)}
        ranks = ([state.mamba_slots(conv=arrays, ssm={}, conv_groups=blocks, tp=(r, width))] for r in range(width))
        return instance(name, *ranks)

    sides = side("p", widths[0], (16, 16, 32)), side("d", widths[1], groups)
    if groups == (16, 16, 32):
        plan.match(*sides)
        return
    said = str(list(groups)) if groups else "one"
    with pytest.raises(MismatchError) as caught:
        plan.match(*sides)
    assert f"conv: blocks of axis 'channel': {said} on decode, [16, 16, 32] on prefill" in str(caught.value)
