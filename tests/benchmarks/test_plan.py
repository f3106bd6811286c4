"""`benchmarks.plan`: its blocks are those that a loop finds, its bytes are the request's, and its ratios are ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from benchmarks import plan

from statelink.plan import Move


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups the loop of an engine found, and their bytes, each time that the benchmark measured it."""
    found: list[int] = []
    loop = plan.grouped_loop

    def grouped_loop(*arguments: Any) -> list[tuple[int, int, int]]:
        groups = loop(*arguments)
        found.append(len(groups))
        found.append(sum(nbytes for _, _, nbytes in groups))
        return groups

    monkeypatch.setattr(plan, "grouped_loop", grouped_loop)
    return found


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the next things take which the benchmark measures."""
    given: list[float] = []

    def best(action: Callable[[], object], rounds: int) -> float:
        action()
        return given.pop(0)

    monkeypatch.setattr(plan, "best", best)
    return given


@pytest.mark.parametrize("kind", ["contiguous", "half", "random"])
def test_the_blocks_are_those_of_the_loop(kind: str, looped: list[int]) -> None:
    row = plan.measure(3, 64, kind, (1, 1), 1)
    assert set(looped[::2]) == {row["blocks"]}
    assert set(looped[1::2]) == {row["bytes"]} == {2 * 3 * 64 * 64 << 10}, "pages of 64 KiB"
    assert (row["layers"], row["items"], row["kind"], row["tp"]) == (3, 64, kind, "1->1")
    if kind == "contiguous":
        assert row["blocks"] == 2 * 3


def test_a_page_falls_apart_into_a_run_for_each_token() -> None:
    row = plan.measure(2, 8, "random", (8, 4), 1)
    assert row["blocks"] == 2 * 2 * 8 * plan.TOKENS
    assert row["bytes"] == 2 * 2 * 8 * (64 << 10) // 8
    assert "loop_over_ours" not in row


def test_the_numbers_are_what_their_names_say(times: list[float]) -> None:
    times += [2e-3, 5e-4, 6e-3]  # our own, copying as many numbers, and the loop
    row = plan.measure(1, 16, "contiguous", (1, 1), 1)
    assert (row["us"], row["over_floor"], row["loop_over_ours"]) == (2000.0, 4.0, 3.0)
    assert row["ns_per_block"] == 2e6 / row["blocks"]


def test_a_planner_that_leaves_something_out_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Move.blocks

    def fewer(move: Any) -> Iterator[Any]:
        for batch in blocks(move):
            yield batch[: len(batch.nbytes) - 1]

    monkeypatch.setattr(Move, "blocks", fewer)
    with pytest.raises(SystemExit, match=r"the blocks have 1048576 bytes, and the request has 2097152"):
        plan.measure(1, 16, "contiguous", (1, 1), 1)


def test_the_best_is_the_median_after_a_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], iter([100.0, 1.0, 9.0, 2.0])

    def action() -> None:
        now[0] += next(took)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert plan.best(action, 3) == 2.0


def test_what_is_compiled_is_kept_for_each_geometry(times: list[float]) -> None:
    times += [3e-3, 4e-3] * 2
    shared, mixed = (plan.compiling(what, 1) for what in ("shared", "mixed"))
    assert (shared["compile"], shared["ms"], shared["route_ms"], shared["components"]) == ("shared", 3.0, 4.0, 1)
    assert mixed["KiB"] > shared["KiB"] > 0


def test_what_is_matched_is_the_description_of_each_rank(times: list[float]) -> None:
    times += [5e-3, 6e-3]
    row = plan.matching((2, 4), 1)
    assert (row["match"], row["ms"], row["route_ms"]) == ("2->4", 5.0, 6.0)
    rank = plan.rank("prefill", 96, 1024, (0, 2), mixed=False, envelope=False)
    assert row["KiB_a_rank"] == round(len(msgspec.msgpack.encode(rank)) / 1024, 1)


def test_indices_are_of_their_kind() -> None:
    rng = np.random.default_rng(1)
    assert plan.indices("contiguous", 5, 100, rng).tolist() == [0, 1, 2, 3, 4]
    for kind in ("random", "half"):
        found = plan.indices(kind, 40, 100, rng)
        assert len(set(found.tolist())) == len(found) == 40
        assert 0 <= found.min() <= found.max() < 100
    assert (np.diff(plan.indices("half", 40, 100, rng).reshape(-1, 2)) == 1).all()
