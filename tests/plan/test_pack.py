"""Parcels: as large as they may be, and made of what is due. What they bring is the oracle's affair."""

from __future__ import annotations

import pytest

from statelink import plan, state
from statelink.errors import RoomError


def example(heads: int = 2, layers: int = 3) -> tuple[plan.Move, plan.Move]:
    """A move of four pages of sixteen tokens from a rank with half of the heads, and what decode expects."""

    def pages(share: int) -> dict[int, tuple[state.Memory, state.Memory]]:
        shape = (8, 16, heads // share, 4)
        return {
            n: (
                state.Memory.pointer((2 * n + 1) << 30, shape, "uint8", 1),
                state.Memory.pointer((2 * n + 2) << 30, shape, "uint8", 1),
            )
            for n in range(layers)
        }

    source = [
        state.describe("p", [state.kv_pages(pages(2), heads=heads, tp=(rank, 2))], rank=rank, ranks=2)
        for rank in range(2)
    ]
    target = state.describe("d", [state.kv_pages(pages(1), heads=heads)])
    part = plan.route(source, [target])[0]
    component = plan.compile_pair(source[part.source], target, part).components["kv"]
    owed = plan.due(component.source, component.target, 64, 0)
    items = plan.required(component.target, 64, 0, [5, 1, 2, 7])
    theirs = plan.pushed(component.source, 64, 0, (0, 64), [0, 3, 4, 6])
    return plan.plan_move(component, theirs, items, owed), plan.expected_move(component, items, owed)


def test_a_parcel_is_as_large_as_it_may_be() -> None:
    move, _ = example()
    assert move.block_nbytes == 4
    assert [len(tiles) for tiles in move.parcels(move.nbytes)] == [1]
    granule = 16 * 4
    sizes = [sum(move.places(tile, "source").nbytes for tile in tiles) for tiles in move.parcels(7 * granule)]
    assert sum(sizes) == move.nbytes == 4 * 6 * granule
    assert sizes == [6 * granule] * 4


@pytest.mark.parametrize(("buffers", "parcels"), [(1, 24), (2, 12), (4, 6), (5, 5), (6, 4), (12, 2), (24, 1)])
def test_no_parcel_is_larger_than_it_may_be(buffers: int, parcels: int) -> None:
    """Four pages of six buffers: a page that does not fit goes in parts, and the next begins where it ended."""
    move, _ = example()
    limit = buffers * 16 * 4
    sizes = [sum(move.places(tile, "source").nbytes for tile in tiles) for tiles in move.parcels(limit)]
    assert sum(sizes) == move.nbytes
    assert max(sizes) <= limit
    assert len(sizes) == parcels


def test_what_cannot_be_divided_names_both_sizes() -> None:
    move, _ = example()
    with pytest.raises(RoomError, match="64 bytes cannot be divided, and a parcel has 63 at most") as error:
        list(move.parcels(63))
    assert error.value.code == "room.staging"


@pytest.mark.parametrize(
    "tile",
    [
        plan.Tile(1, (0, 1), (0, 1)),
        plan.Tile(0, (0, 7), (0, 1)),
        plan.Tile(0, (2, 2), (0, 1)),
        plan.Tile(0, (0, 1), (0, 5)),
        plan.Tile(0, (0, 1), (3, 3)),
        plan.Tile(0, (0, 1), (1 << 61, (1 << 61) + 1)),
    ],
)
def test_a_tile_of_what_is_not_due_is_refused(tile: plan.Tile) -> None:
    """They come from a peer."""
    _, expected = example()
    assert expected.places(plan.Tile(0, (0, 6), (0, 4)), "target").nbytes == expected.nbytes
    with pytest.raises(RoomError, match="what is not due"):
        expected.places(tile, "target")
