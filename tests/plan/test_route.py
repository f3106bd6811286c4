"""Who sends what to whom: every byte has one writer, and every source hears of every request."""

from __future__ import annotations

import pytest

from statelink import plan, state
from statelink.errors import MismatchError
from statelink.state import Buffer, Component, Inventory, Layout, Partition, Region, Slab

from .small import describe, keys, pointer, ranks


@pytest.mark.parametrize("source", [1, 2, 4, 8])
@pytest.mark.parametrize("target", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [1, 2])
def test_who_talks_to_whom(source: int, target: int, stages: int) -> None:
    """§4.4: whom each decode rank contacts, and from how many it waits for an end."""
    layers = [range(2 * stage, 2 * stage + 2) for stage in range(stages)]
    p = [
        describe("p", keys(layers[n // source], 4, 2, 8 // source, 3, heads=8, tp=(n % source, source)), rank=n,
                 ranks=source * stages)
        for n in range(source * stages)
    ]  # fmt: skip
    depth = range(2 * stages)
    d = ranks("d", target, lambda rank: keys(depth, 4, 2, 8 // target, 3, heads=8, tp=(rank, target)))
    real = {(part.source, part.target) for part in plan.route(p, d) if part.shares}
    group = max(source // target, 1)
    for rank in range(target):
        first = rank * group if source > target else rank // (target // source)
        contacted = {stage * source + first + n for stage in range(stages) for n in range(group)}
        assert {s for s, t in real if t == rank} == contacted
    assert all(sum(s == n for s, _ in real) == max(target // source, 1) for n in range(source * stages))


def _replicated(name: str, width: int) -> list[Inventory]:
    return ranks(name, width, lambda rank: state.mla_pages({n: pointer(n + 1, 4, 2, 3) for n in range(12)}))


def test_sources_that_hold_the_same_share_the_load() -> None:
    parts = plan.route(_replicated("p", 4), _replicated("d", 2))
    buffers = {
        (part.target, part.source): sum(len(share.buffers) for share in part.shares) for part in parts if part.shares
    }
    # Twelve layers for each of two destinations, over four sources.
    assert buffers == {(t, s): 3 for t in (0, 1) for s in range(4)}


def test_a_source_that_nobody_reads_from_is_told_so() -> None:
    parts = plan.route(
        ranks("p", 8, lambda r: keys([0], 4, 2, 1, 3, heads=1, tp=(r, 8))),
        [describe("d", keys([0], 4, 2, 1, 3, heads=1))],
    )
    busy = {part.source for part in parts if part.shares}
    assert len(busy) == 1  # keys and values of the one layer go together
    assert sorted(part.source for part in parts) == list(range(8))
    many = plan.route(_replicated("p", 8), [_aux_only(rank) for rank in range(3)])
    assert [(part.source, part.target, part.shares) for part in many] == [(s, s % 3, ()) for s in range(8)]


def _aux_only(rank: int) -> Inventory:
    """Nothing that the sources hold, and nothing that is needed from them."""
    described = state.kv_pages({0: (pointer(1, 1, 1, 1, 1), pointer(2, 1, 1, 1, 1))}, heads=1, optional=True, name="x")
    return describe("d", described, rank=rank, ranks=3)


def test_a_part_that_nobody_holds_is_named_with_its_range() -> None:
    sources = ranks("p", 4, lambda rank: keys([3], 4, 2, 2, 5, heads=8, tp=(rank, 4)))
    targets = ranks("d", 2, lambda rank: keys([3], 4, 2, 4, 5, heads=8, tp=(rank, 2)))
    plan.route(sources, targets)
    with pytest.raises(MismatchError) as caught:
        plan.route([sources[0], sources[1], sources[3]], targets)
    assert caught.value.code == "mismatch.unheld"
    assert str(caught.value) == (
        "no source holds a part of buffer 'layers.3.k' (component kv, decode d, rank 1): "
        "head [4, 6), dim [0, 5) is held by no prefill rank\n"
        "hint: every rank of the prefill instance must be present, and describe what it holds in global coordinates"
    )


def _item(name: str, *slabs: Slab) -> Inventory:
    layout = Layout("uint8", 1, (8,), ("channel",), slabs)
    component = Component(name="mamba", type="mamba", buffers=(Buffer("conv", 0, 0, 8, 2, layout),))
    return Inventory(instance=name, components=(component,), regions=(Region(1, 16),))


@pytest.mark.parametrize("stepped", ["p", "d"])
def test_coordinates_with_gaps_cannot_be_routed(stepped: str) -> None:
    full = Slab((0,), (8,), 0, (1,))
    gaps = Slab((0,), (8,), 0, (1,), (2,))
    sides = [_item(name, gaps if name == stepped else full) for name in "pd"]
    with pytest.raises(MismatchError) as caught:
        plan.route(sides[:1], sides[1:])
    assert caught.value.code == "mismatch.step"
    assert str(caught.value).startswith("slabs with gaps between their coordinates cannot be routed\nhint: ")


@pytest.mark.parametrize("axes", [2, 3, 6])
def test_descriptions_that_shatter_are_refused(axes: int) -> None:
    """What one peer describes must not keep the other busy: each slab has edges of its own on every axis."""
    shape, names = (256,) * axes, tuple("abcdef"[:axes])
    crumbs = tuple(Slab((3 * n,) * axes, (3 * n + 1,) * axes, n, (0,) * axes) for n in range(64))
    dense = Slab((0,) * axes, shape, 0, tuple(256 ** (axes - 1 - axis) for axis in range(axes)))
    sides = []
    for name, slabs in (("p", crumbs), ("d", (dense,))):
        layout = Layout("uint8", 1, shape, names, slabs)
        component = Component(name="aux", type="aux", buffers=(Buffer("row", 0, 0, 0, 1, layout),))
        sides.append(Inventory(instance=name, components=(component,), regions=(Region(1, 1 << 62),)))
    with pytest.raises(MismatchError, match="too many"):
        plan.route(sides[:1], sides[1:])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_positions_that_nobody_holds_are_refused(missing: int) -> None:
    def pages(index: int) -> Inventory:
        held = state.mla_pages({0: pointer(1, 8, 4, 2)}, partition=Partition("contiguous", 3, index))
        return describe("p", held, rank=index, ranks=3)

    sources = [pages(index) for index in range(3) if index != missing]
    with pytest.raises(MismatchError, match=f"nobody holds share {missing} of 3"):
        plan.route(sources, [describe("d", state.mla_pages({0: pointer(1, 8, 4, 2)}))])


@pytest.mark.parametrize("block", [1, 4])
def test_ranks_that_deal_positions_alike_have_one_counterpart_each(block: int) -> None:
    def side(name: str) -> list[Inventory]:
        dealt = [Partition("cyclic", 3, index, block) for index in range(3)]
        described = [state.mla_pages({0: pointer(1, 8, 4, 2)}, partition=partition) for partition in dealt]
        return [describe(name, each, rank=index, ranks=3) for index, each in enumerate(described)]

    parts = plan.route(side("p"), side("d"))
    assert [(part.source, part.target) for part in parts if part.shares] == [(0, 0), (1, 1), (2, 2)]
