"""How often a backend is polled that does not say when its transfers end: over a line of a simulated clock."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from statelink.backend import Batch, Blocks, SubmitMode, Transfer
from statelink.link.prefill._line import Line
from statelink.link.prefill._push import Pushes, Until

KIB = 1 << 10
LATE_SECONDS = 1e-3
"""By so much, the end of a transfer is seen late that has none behind it."""


class Simulated:
    """A backend, a clock and a thread of jobs.

    Attributes:
        now: The time.
        polls: Calls of ``poll``.
        idle: Seconds for which nothing was under way although something waited.
    """

    def __init__(self, rate: float) -> None:
        self.now, self.polls, self.idle, self.free = 0.0, 0, 0.0, 0.0
        self._rate = rate
        self._ends: dict[Transfer, float] = {}
        self._jobs: deque[Callable[[], object]] = deque()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        limits = SimpleNamespace(
            max_bytes=64 << 20,
            max_blocks=1 << 14,
            max_transfers=32,
            submit_mode=SubmitMode.BLOCKING,
            ends_unpolled=False,
            joins_rooms=False,
            prompt_bytes=0,
        )
        backend = SimpleNamespace(capabilities=limits, submit=self._submit, poll=self._poll)
        moves = SimpleNamespace(
            submit_job=lambda _, job: self._jobs.append(job),
            submit_promptly=lambda _, job, **__: self._jobs.append(job),
            submit_after=self._submit_after,
        )
        context: Any = SimpleNamespace(
            backend=backend,
            config=SimpleNamespace(slice_bytes=64 << 20),
            now=lambda: self.now,
            post_job=self._jobs.append,
            workers=SimpleNamespace(moves=moves),
        )
        self.line = Line(context, "decode")

    def _submit_after(self, _: Any, job: Callable[[], object], seconds: float) -> None:
        heapq.heappush(self._later, (self.now + seconds, next(self._numbers), job))

    def _submit(self, _: str, batch: Batch) -> Transfer:
        made = Transfer()
        if self._ends:
            self.idle += max(0.0, self.now - self.free)
        self.free = self._ends[made] = max(self.now, self.free) + batch.blocks.total / self._rate
        return made

    def _poll(self, transfers: list[Transfer]) -> None:
        self.polls += 1
        for each in transfers:
            if self._ends[each] <= self.now:
                each.succeed()

    def run(self) -> None:
        """Go on until nothing is left to do."""
        while self._jobs or self._later:
            if not self._jobs:
                self.now, _, job = heapq.heappop(self._later)
                self._jobs.append(job)
            self._jobs.popleft()()


class Push(Pushes):
    """One push of so many bytes, in a single batch."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        one, none = (np.array([each], np.uint64) for each in (nbytes, 0))
        region = np.zeros(1, np.uint32)
        self._batch: Batch | None = Batch(Blocks(none, none, one, region, region), 1, 1, (b"", b""))
        self.ended = False

    def step(self, answer: Transfer | BaseException | None = None) -> Batch | Until | None:
        batch, self._batch = self._batch, None
        if batch is not None:
            return batch
        if self.flights or answer is not None:
            return Until.ENDED
        self.waiting.popleft()
        self.ended = True
        return None


def moved(simulated: Simulated, count: int, nbytes: int) -> list[Push]:
    """So many pushes that come together, until all have ended."""
    made = [Push(nbytes) for _ in range(count)]
    for each in made:
        simulated.line.add_push(each, None, lambda _: None, 1, nbytes)  # type: ignore[arg-type]
    simulated.run()
    assert all(each.ended for each in made)
    return made


@pytest.mark.parametrize("mbit", [400, 1000, 10_000])
def test_a_busy_line_is_polled_a_few_times_for_each_transfer_and_never_runs_dry(mbit: int) -> None:
    simulated = Simulated(mbit * 1e6 / 8)
    moved(simulated, 64, 2048 * KIB)  # so that the rate is known
    simulated.polls, simulated.idle, began = 0, 0.0, simulated.now
    moved(simulated, 256, 512 * KIB)
    assert simulated.polls <= 4 * 256
    assert simulated.idle <= (simulated.now - began) / 100


@pytest.mark.parametrize("mbit", [400, 1000, 10_000])
def test_the_end_of_a_transfer_alone_is_seen_soon(mbit: int) -> None:
    simulated = Simulated(mbit * 1e6 / 8)
    moved(simulated, 64, 2048 * KIB)
    moved(simulated, 1, 64 * KIB)
    assert simulated.now - simulated.free <= LATE_SECONDS
