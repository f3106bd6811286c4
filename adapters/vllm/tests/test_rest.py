"""An engine that only holds state for other servers rests, until anything comes for it."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import pytest
from support.engines import PREFILL
from support.simulated_pair import STREAMS, pair_of

from statelink_vllm.connector import rest

if TYPE_CHECKING:
    from pathlib import Path

    from support.simulated_engine import SimulatedEngine

pytestmark = pytest.mark.smoke


class Waits(threading.Condition):
    """Counts how often somebody waits for it, and lets nobody wait."""

    count = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, "what ends on the link alone would not be noticed"
        self.count += 1
        return False


class Core:
    """An engine core as vLLM's, as far as a step looks for it."""

    def __init__(self, engine: SimulatedEngine | None, *, running: bool) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.input_queue.not_empty = self.waits = Waits(self.input_queue.mutex)
        self.engines_running = running
        self._engine = engine

    def step(self) -> int:
        """Step, and tell how often that has waited."""
        before = self.waits.count
        assert self._engine is not None
        self._engine.step()
        return self.waits.count - before

    def rest(self, *, awaited: bool) -> None:
        rest(awaited=awaited)


@pytest.mark.parametrize(("role", "kinds"), [("kv_producer", ("full",)), ("kv_both", ("recurrent", "full"))])
def test_only_a_step_that_has_nothing_to_do_waits(configuration: Path, role: str, kinds: tuple[str, ...]) -> None:
    pair = pair_of(configuration, kinds, blocks=(4, 4), spare=(30, 30), role=role)
    prefill = pair.engines[0]
    core = Core(prefill, running=False)
    prefill.add("held", STREAMS[0][:20], 1, PREFILL)
    while "held" not in prefill.ended:
        assert core.step() == 0
    assert core.step() == 0, "it has told nobody to send"
    assert [core.step() for _ in range(3)] == [1, 1, 1]
    core.input_queue.put("a request comes")
    assert core.step() == 0
    core.input_queue.get()
    prefill.add("other", STREAMS[1][:20], 4, None)
    while "other" not in prefill.ended:
        assert core.step() == 0
    pair.network.rooms["send"][0].end()
    for _ in range(3):
        core.step()
    assert not prefill.busy
    assert prefill.pool.get_num_free_blocks() == prefill.free


@pytest.mark.parametrize("running", [True, False])
def test_a_rank_for_which_others_wait_does_not_rest(configuration: Path, running: bool) -> None:
    """Ranks of data parallelism that share experts step together, while any of them has work."""
    core = Core(None, running=running)
    core.rest(awaited=True)
    assert core.waits.count == int(not running)
