"""Large copies that end in the middle: what is quiet may be used again at once, and nothing reaches it any more."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.helpers.pair import Pair
from tests.helpers.peers import until
from tests.helpers.pools import Aux, Kv

from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.expect import Case
    from tests.link.conftest import TwoEngines

POOLS = (Kv(layers=tuple(range(8)), pages=96, heads=8, dim=64), Aux())
TOKENS = 80 * 16
"""Twenty megabytes: tens of milliseconds."""
POISON = 0xA5A5
ROUNDS = 6


@pytest.fixture
def large(two_engines: TwoEngines) -> Pair:
    made = two_engines.pair(POOLS, POOLS, slice_bytes=256 << 10, heartbeat=0.25, liveness=2.0)
    made.run(TOKENS)
    return made


def poison(pair: Pair, side: str, case: Case) -> None:
    """What an engine does with memory that it was given back: it writes to it."""
    link, items = (pair.prefill, case.source) if side == "prefill" else (pair.decode, case.target)
    for array in link.memory.arrays["kv"].values():
        array[items["kv"]] = POISON


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_memory_is_used_again_after_an_abort(large: Pair, side: str) -> None:
    """Whoever aborts, at whatever moment: decode's new bytes stay, and prefill's new bytes go nowhere."""
    order = random.Random(11)
    stopped = 0
    for _ in range(ROUNDS):
        case = large.case(TOKENS)
        old = large.decode.memory.copy()
        receiving, sending = large.begin(case)
        sending.reach(Status.WAITING)
        large.push(sending, case)
        time.sleep(order.uniform(0, 0.02))
        (sending if side == "prefill" else receiving).abort("in the middle")
        seen = sending.wait(quiesced=True)
        assert seen.quiesced
        poison(large, "prefill", case)
        assert receiving.wait(quiesced=True).quiesced
        for label, array in large.decode.memory.arrays["kv"].items():
            for at, onto in zip(case.source["kv"], case.target["kv"], strict=True):
                was, sent = old.arrays["kv"][label][onto], large.untouched.arrays["kv"][label][at]
                strange = (array[onto] != was) & (array[onto] != sent)
                assert not strange.any(), f"{label}: bytes that were written after prefill was quiet"
        poison(large, "decode", case)
        time.sleep(0.05)
        for array in large.decode.memory.arrays["kv"].values():
            assert (array[case.target["kv"]] == POISON).all(), "bytes landed in memory that was given back"
        stopped += seen.status is Status.FAILED
        large.prefill.memory.bytes[:] = large.untouched.bytes
        large.pardon(case)
        large.done(case)
        assert large.decode.memory.differences(large.expected) == []
    assert stopped, "every copy was faster than the abort: this looked at nothing"
    large.run(TOKENS)
    large.idle()


@pytest.mark.parametrize(
    ("backend", "side"),
    [("tcp", "prefill"), ("nixl", "prefill"), ("nixl", "decode"), ("mooncake", "decode")],
    indirect=["backend"],
    scope="session",
)
def test_a_side_is_killed_in_the_middle(two_engines: TwoEngines, side: str) -> None:
    """Without a fault that was put there: whatever the library does then."""
    doomed = two_engines.engine()
    live = {"slice_bytes": 1 << 20, "heartbeat": 0.25, "liveness": 2.0}
    engines = {"prefill": two_engines.prefill, "decode": two_engines.decode, side: doomed}
    made = Pair(*(two_engines.open(role, POOLS, engine=engines[role], **live) for role in ("prefill", "decode")))
    made.run(TOKENS)
    case = made.case(TOKENS)
    first = made.decode.memory.arrays["kv"]["layers.0.k"]
    before = first[case.target["kv"]].copy()
    receiving, sending = made.begin(case)
    made.push(sending, case)
    until(lambda: not np.array_equal(first[case.target["kv"]], before))
    doomed.kill()
    left = sending if side == "decode" else receiving
    seen = left.wait(15)
    made.pardon(case)
    made.verify()
    if seen.status is Status.FAILED:  # else the last byte was faster
        assert made.prefill.name in str(seen.reason) or made.decode.name in str(seen.reason)
        two_engines.untidy = two_engines.backend != "tcp"
    survivor, role = (made.prefill, "decode") if side == "decode" else (made.decode, "prefill")
    other = two_engines.open(role, POOLS, **live)
    again = Pair(survivor, other) if side == "decode" else Pair(other, survivor)
    again.run(TOKENS)
