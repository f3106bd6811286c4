"""What a small request costs in counts that do not depend on the machine: messages, batches, checks, waits.

A budget is the least count of some requests, as it was measured. Lower it with each improvement. A change that needs
more has to say why. Waits may be `WAITS` more: whether a thread has to wait is a matter of moments. Calls of functions
have no budget, because a budget would pay for worse code. They are only reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.helpers.pools import Aux, Kv, Mamba

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

COUNTING = "tests.link.counting"
POOLS = (Kv(name="swa", layers=(0, 1), pages=64, window=32), Mamba(), Aux())
"""One sliding window, one recurrent slot and one row."""
TOKENS = 64
WARM, ROOMS = 10, 20
WAITS = 2
REPORTED = "calls", "other calls"
"""Calls of Python functions, on the control thread and on other threads. See `counting.take`."""
LIMITED = "messages", "batches", "checks", "waits"
"""See `counting.take`. Checks are of lists of blocks, against registered memory."""
BUDGETS = {
    "tcp": {"prefill": (1, 1, 2, 1), "decode": (2, 0, 0, 3)},
    "nixl": {"prefill": (1, 1, 2, 2), "decode": (2, 0, 0, 2)},
    "mooncake": {"prefill": (1, 1, 2, 2), "decode": (2, 0, 0, 2)},
}
"""For each backend and side, how many there are of `LIMITED`."""


@pytest.fixture
def engines(_engine_pairs: Callable[..., TwoEngines], backend: str) -> TwoEngines:
    return _engine_pairs(backend, "budgets")


def test_a_small_request_keeps_to_its_budget(engines: TwoEngines, tell: Callable[[str], None]) -> None:
    for engine in engines.engines:
        engine.run(COUNTING, "begin", engines.backend)
    made = engines.pair(POOLS, POOLS)
    found: dict[str, list[dict[str, int]]] = {engine.name: [] for engine in engines.engines}
    for _ in range(WARM + ROOMS):
        made.run(TOKENS)
        made.idle()
        for engine in engines.engines:
            found[engine.name].append(engine.run(COUNTING, "take"))
    engines.clear()
    least = {
        side: {what: min(each[what] for each in seen[WARM:]) for what in (*REPORTED, *LIMITED)}
        for side, seen in found.items()
    }
    tell(f"{engines.backend}: {least}")
    for side, budgets in BUDGETS[engines.backend].items():
        for what, budget in zip(LIMITED, budgets, strict=True):
            count = least[side][what]
            assert count <= budget + WAITS * (what == "waits"), f"{side} needs {count} {what}, and has {budget}"
