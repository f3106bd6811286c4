"""What a small request costs in counts, which hardly depend on the machine: calls, messages, waits, batches.

A budget is the least count of some requests, as it was measured. Lower it with each improvement. A change that needs
more than `MORE` of it has to say why. Waits may be `WAITS` more: whether a thread has to wait is a matter of moments.
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
MORE, WAITS = 1.1, 2
WHAT = "calls", "other calls", "messages", "batches", "checks", "waits"
"""See `counting.take`. Checks are of lists of blocks, against registered memory."""
BUDGETS = {
    "tcp": {"prefill": (526, 0, 1, 1, 2, 1), "decode": (307, 94, 2, 0, 0, 3)},
    "nixl": {"prefill": (490, 0, 1, 1, 2, 2), "decode": (224, 0, 2, 0, 0, 2)},
    "mooncake": {"prefill": (299, 173, 1, 1, 2, 5), "decode": (236, 0, 2, 0, 0, 2)},
}
"""For each backend and side, how many there are of `WHAT`. Where rooms can share a batch, a room alone pays about fifty
calls for that."""


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
    least = {side: tuple(min(each[what] for each in seen[WARM:]) for what in WHAT) for side, seen in found.items()}
    tell(f"{engines.backend}: {least}")
    for side, budgets in BUDGETS[engines.backend].items():
        for what, count, budget in zip(WHAT, least[side], budgets, strict=True):
            assert count <= MORE * budget + WAITS * (what == "waits"), f"{side} needs {count} {what}, and has {budget}"
