"""Recurrent states that are cut over different widths: the worked examples, to the byte."""

from __future__ import annotations

import pytest

from statelink import plan, state
from statelink.state import Inventory, Memory

from .small import STEP, Moved, moves, ranks, runs

KEY, VALUE = 2048, 4096
SLOTS = 5


def bf16(number: int, *shape: int) -> Memory:
    return Memory.pointer(number * STEP, shape, "bfloat16", 2)


def f32(number: int, *shape: int) -> Memory:
    return Memory.pointer(number * STEP, shape, "float32", 4)


def qwen(name: str, width: int) -> list[Inventory]:
    """Key 16 x 128, value 32 x 128, kernel 4: convolutions in bf16, 32 heads of 128 x 128 in f32."""
    channels = (2 * KEY + VALUE) // width

    def make(rank: int) -> state.Described:
        return state.mamba_slots(
            conv={0: bf16(1, SLOTS, channels, 3)},
            ssm={0: f32(2, SLOTS, 32 // width, 128, 128)},
            conv_groups=(KEY, KEY, VALUE),
            heads=32,
            tp=(rank, width),
        )

    return ranks(name, width, make)


DOWN = {
    (0, 0): ([(0, 0, 3072), (3072, 6144, 3072), (6144, 12288, 6144)], (0, 0, 524288)),
    (1, 0): ([(0, 3072, 3072), (3072, 9216, 3072), (6144, 18432, 6144)], (0, 524288, 524288)),
    (2, 1): ([(0, 0, 3072), (3072, 6144, 3072), (6144, 12288, 6144)], (0, 0, 524288)),
    (3, 1): ([(0, 3072, 3072), (3072, 9216, 3072), (6144, 18432, 6144)], (0, 524288, 524288)),
}


UP = {
    (0, 0): ([(0, 0, 3072), (6144, 3072, 3072), (12288, 6144, 6144)], (0, 0, 524288)),
    (1, 2): ([(0, 0, 3072), (6144, 3072, 3072), (12288, 6144, 6144)], (0, 0, 524288)),
    (0, 1): ([(3072, 0, 3072), (9216, 3072, 3072), (18432, 6144, 6144)], (524288, 0, 524288)),
    (1, 3): ([(3072, 0, 3072), (9216, 3072, 3072), (18432, 6144, 6144)], (524288, 0, 524288)),
}


@pytest.mark.parametrize(("widths", "expected"), [((4, 2), DOWN), ((2, 4), UP)], ids=["4 to 2", "2 to 4"])
def test_groups_are_sliced_each_on_its_own(
    widths: tuple[int, int], expected: dict[tuple[int, int], tuple[list[Moved], Moved]]
) -> None:
    sources, targets = qwen("p", widths[0]), qwen("d", widths[1])
    conv_items = [8192 // width * 6 for width in widths]
    ssm_items = [32 // width * 65536 for width in widths]
    parts = {(part.source, part.target): part for part in plan.route(sources, targets)}
    assert set(parts) == set(expected)
    slots = 3, 1
    for (s, t), (conv, ssm) in expected.items():
        found = moves(sources[s], targets[t], parts[s, t], "mamba", ([slots[0]], [slots[1]]))
        base = slots[0] * conv_items[0], slots[1] * conv_items[1]
        assert runs(found, 1) == [(base[0] + a, base[1] + b, n) for a, b, n in conv]
        base = slots[0] * ssm_items[0], slots[1] * ssm_items[1]
        assert runs(found, 2) == [(base[0] + ssm[0], base[1] + ssm[1], ssm[2])]


def kimi(name: str, width: int) -> list[Inventory]:
    """Three blocks of 1024 channels, channels last, three rows."""
    return ranks(
        name,
        width,
        lambda rank: state.mamba_slots(
            conv={0: bf16(1, SLOTS, 3, 3 * 1024 // width)},
            ssm={},
            conv_groups=(1024, 1024, 1024),
            tp=(rank, width),
            transposed=True,
        ),
    )


@pytest.mark.parametrize("writer", [0, 1])
def test_channels_that_come_last_are_sliced_row_by_row(writer: int) -> None:
    sources, targets = kimi("p", 2), kimi("d", 1)
    part = next(part for part in plan.route(sources, targets) if part.source == writer)
    found = runs(moves(sources[writer], targets[0], part, "mamba", ([0], [0])), 1)
    offsets = [
        (0, 1024),
        (1024, 3072),
        (2048, 5120),
        (3072, 7168),
        (4096, 9216),
        (5120, 11264),
        (6144, 13312),
        (7168, 15360),
        (8192, 17408),
    ]
    back = 0 if writer else 1024
    assert sorted(found) == [(s, t - back, 1024) for s, t in offsets]


def test_widths_that_do_not_divide_each_other_meet_in_pieces() -> None:
    def make(name: str, width: int) -> list[Inventory]:
        return ranks(
            name,
            width,
            lambda rank: state.mamba_slots(
                conv={0: bf16(1, 2, 24 // width, 1)}, ssm={}, conv_groups=(6, 6, 12), tp=(rank, width)
            ),
        )

    sources, targets = make("p", 2), make("d", 3)
    found = {
        (part.source, part.target): runs(
            moves(sources[part.source], targets[part.target], part, "mamba", ([0], [0])), 1
        )
        for part in plan.route(sources, targets)
    }
    # First group, six channels: ranks 0-2 | 3-5 to 0-1 | 2-3 | 4-5; the others alike.
    assert found[0, 0] == [(0, 0, 4), (6, 4, 4), (12, 8, 8)]
    assert found[0, 1] == [(4, 0, 2), (10, 4, 2), (20, 8, 4)]
    assert found[1, 1] == [(0, 2, 2), (6, 6, 2), (12, 12, 4)]
    assert found[1, 2] == [(2, 0, 4), (8, 4, 4), (16, 8, 8)]
    assert set(found) == {(0, 0), (0, 1), (1, 1), (1, 2)}
