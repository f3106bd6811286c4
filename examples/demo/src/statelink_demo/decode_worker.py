"""Decode's process: generates from what arrives, and is never told a prompt."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import statelink
from statelink_demo.engine import RowError, decode
from statelink_demo.inventory import linked
from statelink_demo.messages import Expect, Expected, Failed, Finished, Ready, Served, Settings
from statelink_demo.model import build_model, configure_torch
from statelink_demo.pools import OutOfItemsError, StatePools
from statelink_demo.processes import StoppedError

if TYPE_CHECKING:
    from transformers import Qwen3NextForCausalLM

    from statelink_demo.messages import Answer
    from statelink_demo.pools import Allocation
    from statelink_demo.processes import Pipe

__all__ = ["run"]

NAP = 0.01
"""Most seconds to wait for the link when there is nothing to decode."""


def run(pipe: Pipe, settings: Settings) -> None:
    """Answer requests until the parent hangs up."""
    configure_torch()
    model = build_model(settings.seed)
    # Other sizes and another order than prefill's: only the transfer makes the two agree.
    pools = StatePools(model.config, pages=80, slots=6, rows=7, seed=2)
    with linked("decode", settings, model, pools) as link:
        pipe.send(Ready())
        server = _Server(pipe, link, model, pools, settings.tokens)
        while (work := pipe.receive(Expect)) is not None:
            server.serve(work)


@dataclass(eq=False)
class _Job:
    """One request: what decode knows of it, and what it holds once memory was free."""

    expected: Expected
    room: statelink.Receiving
    opened: float
    held: Allocation | None = None
    over: bool = False

    @property
    def arrived(self) -> float:
        """When everything was visible: the link's own measure, however long this loop was busy since."""
        return self.opened + self.room.report.waited + self.room.report.transferred


class _Server:
    def __init__(
        self, pipe: Pipe, link: statelink.Link, model: Qwen3NextForCausalLM, pools: StatePools, count: int
    ) -> None:
        self._pipe = pipe
        self._link = link
        self._model = model
        self._pools = pools
        self._count = count
        self._jobs: dict[int, _Job] = {}
        self._arrived: deque[_Job] = deque()

    def serve(self, work: Expect) -> None:
        """Open every room at once; accept each as soon as memory is free; decode in order of arrival."""
        for expected in work.requests:
            self._check(expected.sabotage)
            opened = time.monotonic()
            room = self._link.receive(expected.room, peer=work.peer, tokens=expected.tokens)
            self._jobs[expected.room] = _Job(expected, room, opened)
        waiting = deque(self._jobs.values())
        while self._jobs:
            while waiting and self._accept(waiting[0]):
                waiting.popleft()
            self._look(timeout=0 if self._arrived else NAP)
            if self._arrived:
                self._answer(self._arrived.popleft())
        self._pipe.send(Finished())

    def _accept(self, job: _Job) -> bool:
        """Say where a request's state belongs; false while there is no memory for it."""
        if job.room.status is statelink.Status.FAILED:
            return True
        try:
            job.held = self._pools.allocate(job.expected.tokens)
        except OutOfItemsError:
            return False
        job.room.accept(job.held.items())
        return True

    def _look(self, timeout: float) -> None:
        """Take in what changed: requests that arrived or failed, and memory that became quiet."""
        for room in self._link.changes(timeout):
            job = self._jobs.get(room.room)
            if job is None:
                continue
            if job.over:
                self._release(job)
            elif room.status is statelink.Status.FAILED:
                self._pipe.send(Failed(room.room, str(room.reason)))
                self._release(job)
            elif room.status is statelink.Status.SUCCEEDED and job not in self._arrived:
                self._arrived.append(job)

    def _answer(self, job: _Job) -> None:
        expected, held = job.expected, job.held
        assert held is not None
        self._zero(expected.sabotage, held)
        digests = self._pools.digests(held, expected.tokens)
        answer: Answer | None = None
        refused = ""
        try:
            answer = decode(self._model, self._pools, held, expected.room, self._count)
        except RowError as error:
            refused = str(error)
        moved = {name: (each.nbytes, each.blocks) for name, each in job.room.report.moved.items()}
        self._pipe.send(Served(expected.room, job.arrived, moved, digests, answer, refused))
        self._release(job)

    def _release(self, job: _Job) -> None:
        """Give memory back, but not before Statelink says that nothing can write it any more."""
        job.over = True
        if not job.room.quiesced:
            return  # `changes` will name the room again
        if job.held is not None:
            self._pools.release(job.held)
        del self._jobs[job.expected.room]

    def _check(self, sabotage: str) -> None:
        known = [pool.label for pool in self._pools.all]
        if sabotage and sabotage not in known:
            raise StoppedError(f"no pool named {sabotage!r} to zero; there are {', '.join(known)}")

    def _zero(self, sabotage: str, held: Allocation) -> None:
        for pool in self._pools.all:
            if pool.label == sabotage:
                pool.raw()[list(held.items()[pool.index])] = 0
