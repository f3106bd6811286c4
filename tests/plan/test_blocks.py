"""Blocks: what a backend is given, cut into slices and joined again."""

from __future__ import annotations

import numpy as np
import pytest

from statelink.plan import Blocks

MIB = 1 << 20


def blocks(*sizes: int) -> Blocks:
    n = len(sizes)
    place = np.arange(n, dtype=np.uint64)
    return Blocks(
        place * np.uint64(1000),
        place * np.uint64(2000),
        np.array(sizes, np.uint64),
        np.arange(n, dtype=np.uint32),
        np.arange(n, dtype=np.uint32) + np.uint32(7),
    )


@pytest.mark.parametrize(
    ("sizes", "max_blocks", "max_bytes", "expected"),
    [
        ((5, 5, 5, 5), 9, 10, [[5, 5], [5, 5]]),
        ((5, 5, 5, 5), 3, 100, [[5, 5, 5], [5]]),
        ((5, 50, 5), 9, 10, [[5], [50], [5]]),
        ((50,), 9, 10, [[50]]),
        ((3, 3, 3, 3), 9, 7, [[3, 3], [3, 3]]),
        ((1,) * 5, 1, 1, [[1]] * 5),
        ((10, 1, 9), 9, 10, [[10], [1, 9]]),
        ((), 9, 10, []),
    ],
)
def test_slices_are_bounded_and_lose_nothing(
    sizes: tuple[int, ...], max_blocks: int, max_bytes: int, expected: list[list[int]]
) -> None:
    whole = blocks(*sizes)
    parts = list(whole.slices(max_blocks, max_bytes))
    assert [part.nbytes.tolist() for part in parts] == expected
    joined = Blocks.concatenate(parts)
    for field in ("source", "target", "nbytes", "source_region", "target_region"):
        assert getattr(joined, field).tolist() == getattr(whole, field).tolist()
        assert getattr(joined, field).dtype == getattr(whole, field).dtype
    assert (joined.count, joined.total) == (len(sizes), sum(sizes))


def test_slices_of_large_blocks_do_not_overflow() -> None:
    whole = blocks(1 << 62, 1 << 61, 1)
    assert [part.count for part in whole.slices(10, 1 << 62)] == [1, 2]


@pytest.mark.parametrize(
    ("sizes", "max_blocks", "max_bytes", "expected"),
    [
        ((5 * MIB + 3, 7), 9, 2 * MIB, [[2 * MIB], [2 * MIB], [MIB + 3, 7]]),
        ((4 * MIB,), 1, 2 * MIB, [[2 * MIB]] * 2),
        ((2 * MIB + 1,), 9, 100, [[MIB], [MIB], [1]]),
        ((3, 4), 9, 5, [[3], [4]]),
    ],
)
def test_pieces_cut_blocks_down_to_a_mebibyte(
    sizes: tuple[int, ...], max_blocks: int, max_bytes: int, expected: list[list[int]]
) -> None:
    whole = blocks(*sizes)
    parts = list(whole.pieces(max_blocks, max_bytes))
    assert [part.nbytes.tolist() for part in parts] == expected
    joined = Blocks.concatenate(parts)
    for number in range(len(sizes)):
        own = joined.source_region == number
        offsets = np.cumsum(joined.nbytes[own]) - joined.nbytes[own]
        assert joined.nbytes[own].sum() == sizes[number]
        assert (joined.source[own] == whole.source[number] + offsets).all()
        assert (joined.target[own] == whole.target[number] + offsets).all()
        assert (joined.target_region[own] == whole.target_region[number]).all()


def test_nothing_is_blocks_too() -> None:
    nothing = Blocks.concatenate([])
    assert (nothing.count, nothing.total) == (0, 0)
    assert nothing.source.dtype == np.uint64
    assert nothing.source_region.dtype == np.uint32
