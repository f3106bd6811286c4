"""What can only be seen once every rank of an instance is known: who is whose replica, and who contradicts whom."""

from __future__ import annotations

import pytest

from statelink import plan, state
from statelink.errors import MismatchError, StateError
from statelink.state import Described, Inventory, Partition

from .small import instance_of, kv_share, pointer, ring_share, row

STAGES = [{"pp": (stage, 2), "tp": (0, 1)} for stage in range(2)]
CONTRADICTING: list[tuple[str, list[Inventory], str, str]] = [
    (
        "one tp twice",
        instance_of("x", [kv_share(0, 2)], [kv_share(0, 2)], [kv_share(1, 2)]),
        "replicas",
        "ranks 0 and 1 .*share 0 of 2",
    ),
    (
        "all of it twice",
        instance_of("x", [kv_share()], [kv_share()]),
        "replicas",
        "all of each item; each says .* all of it",
    ),
    ("a ring without a word", instance_of("x", [ring_share(heads=1)], [ring_share(heads=1)]), "replicas", "layers.0.k"),
    ("rows without a word", instance_of("x", [kv_share(0, 2)], [kv_share(1, 2)]), "", ""),
    ("a row without a word", instance_of("x", [row()], [row()]), "replicas", "ranks 0 and 1 hold .*buffer 'row'"),
    ("one of them says so", instance_of("x", [row()], [row(replicated=True)]), "replicas", "buffer 'row'"),
    (
        "shares that overlap",
        instance_of("x", [kv_share(0, 2)], [kv_share(1, 2)], [kv_share(0, 4)]),
        "replicas",
        "ranks 0 and 2 .*share 0 of 2 and share 0 of 4",
    ),
    (
        "stages from 0",
        instance_of("x", [kv_share(replicated=True)], [kv_share(replicated=True)], axes=STAGES),
        "layers",
        "layers.0.k' is on rank 0 \\(pp 0\\) and on rank 1 \\(pp 1\\)",
    ),
    (
        "sizes of an axis",
        instance_of("x", [kv_share(0, 2)], [kv_share(1, 2)], axes=[{"cp": (0, 2)}, {"cp": (1, 3)}]),
        "axes",
        "axis 'cp' .*rank 0 says 2, rank 1 says 3",
    ),
    (
        "an axis that one leaves out",
        instance_of("x", [kv_share(0, 2)], [kv_share(1, 2)], axes=[{"pp": (0, 2)}, {}]),
        "axes",
        "rank 1 does not name axis 'pp' .*rank 0 is 0 of 2 on it",
    ),
    (
        "one place twice",
        instance_of("x", [kv_share(0, 2)], [kv_share(1, 2)], axes=[{"cp": (1, 2)}, {"cp": (1, 2)}]),
        "axes",
        "ranks 0 and 1 are both cp 1 of 2",
    ),
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("ranks", "code", "text"), [case[1:] for case in CONTRADICTING], ids=[case[0] for case in CONTRADICTING]
)
def test_ranks_that_contradict_each_other_are_refused(side: str, ranks: list[Inventory], code: str, text: str) -> None:
    whole = instance_of("y", [kv_share(), ring_share(heads=1), row()])
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
    for parts in ([row(replicated=True)], [kv_share(replicated=True)], [ring_share(replicated=True)]):
        plan.match(instance_of("p", parts, parts), instance_of("d", parts))
    # Context-parallel ranks have windows alike; positions tell their pages apart.
    contexts = [
        [
            kv_share(rank % 2, 2, partition=Partition("contiguous", 2, rank // 2)),
            ring_share(rank % 2, 2, replicated=True),
        ]
        for rank in range(4)
    ]
    plan.match(instance_of("p", *contexts), instance_of("d", [kv_share(), ring_share()]))


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
    for parts, axes in (([kv_share(1, 2), rows], None), ([rows], {"tp": (1, 2)})):
        with pytest.raises(StateError, match=f"component '{name}' does not say .*\n.*replicated=True"):
            state.describe("x", parts, rank=1, ranks=2, axes=axes)
        state.describe("x", [rows], axes={"tp": (0, 1)})


def test_a_ring_holds_its_share_of_heads() -> None:
    """Formulas as engines share KV heads out: rank r of X holds r * T / X on, or head r // (X / T)."""
    for heads, width in ((4, 1), (4, 2), (4, 4), (2, 8), (8, 2)):
        for rank in range(width):
            (slab,) = ring_share(rank, width, heads).component.buffers[0].layout.slabs
            each = max(1, heads // width)
            first = rank * each if heads >= width else rank // (width // heads)
            assert (slab.start[0], slab.stop[0]) == (first, first + each)
    with pytest.raises(StateError, match=r"an item of the array is head 4, axis0 2; this rank's share is head 2"):
        state.ring_rows({0: {"k": pointer(1, 3, 8, 4, 2)}}, type="swa_ring", window=4, heads=4, tp=(0, 2))
    with pytest.raises(StateError, match="does not say how 2 TP ranks share its rows"):
        state.ring_rows({0: {"k": pointer(1, 3, 8, 4, 2)}}, type="swa_ring", window=4, tp=(0, 2))


def test_a_share_that_contradicts_the_axis_is_refused() -> None:
    with pytest.raises(StateError, match="'kv' and the axis 'tp' contradict each other: it holds share 0 of 2"):
        state.describe("x", [kv_share(0, 2)], rank=1, ranks=2, axes={"tp": (1, 2)})
    state.describe("x", [kv_share(0, 2)], rank=1, ranks=4, axes={"tp": (1, 4)})  # this state has a width of its own
