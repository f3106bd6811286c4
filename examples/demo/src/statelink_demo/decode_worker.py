"""Decode's process: generates from what arrives, and is never told a prompt."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import statelink
from statelink.errors import ClosedError
from statelink_demo.allocator import OutOfItemsError
from statelink_demo.control import Control, StoppedError
from statelink_demo.decode import DecodeEngine, RowError
from statelink_demo.fingerprint import fingerprints, label
from statelink_demo.inventory import KV, MAMBA, METADATA
from statelink_demo.linking import linked
from statelink_demo.messages import (
    Arrived,
    Count,
    Expect,
    Expected,
    Failed,
    Finished,
    Opened,
    Ready,
    Refused,
    Start,
    answered,
)
from statelink_demo.model import build_model
from statelink_demo.pools import StatePools
from statelink_demo.runtime import configure_torch
from statelink_demo.shape import StateShape

if TYPE_CHECKING:
    from statelink_demo.pools import Allocation

__all__ = ["run"]

NAP = 0.001
"""Seconds between looks at the link when there is nothing to decode."""


def run(control: Control, start: Start) -> None:
    """Expect requests until the parent hangs up."""
    configure_torch()
    model = build_model(start.seed)
    # Other sizes and another order than prefill's: only the transfer makes the two agree.
    pools = StatePools(StateShape.of(model.config), pages=80, slots=6, rows=7, seed=2)
    with linked("decode", start, model, pools) as link:
        control.send(Ready(link.address))
        server = _Server(control, link, DecodeEngine(model, pools))
        while (command := control.receive(Expect)) is not None:
            server.serve(command)


@dataclass(eq=False)
class _Job:
    """One request: what decode knows of it, and what it holds once memory was free."""

    expected: Expected
    room: statelink.Receiving
    opened: float
    held: Allocation | None = None
    arrived: bool = False
    over: bool = False

    @property
    def arrived_at(self) -> float:
        """When everything was visible: the link's own measure, however long this loop was busy since."""
        report = self.room.report
        return self.opened + report.waited + report.transferred


class _Server:
    def __init__(self, control: Control, link: statelink.Link, engine: DecodeEngine) -> None:
        self._control = control
        self._link = link
        self._engine = engine
        self._pools = engine.pools
        self._jobs: dict[int, _Job] = {}
        self._arrived: deque[_Job] = deque()

    def serve(self, command: Expect) -> None:
        """Open every room at once; accept each as soon as memory is free; decode in order of arrival."""
        for expected in command.requests:
            self._check(expected.sabotage)
            opened = time.monotonic()
            room = self._link.receive(expected.room, command.peer, expected.tokens)
            self._jobs[expected.room] = _Job(expected, room, opened)
        self._control.send(Opened())
        waiting = deque(self._jobs.values())
        while self._jobs and not self._control.closed:
            while waiting and self._accept(waiting[0]):
                waiting.popleft()
            self._look()
            if self._arrived:
                self._decode(self._arrived.popleft(), command.count)
            else:
                time.sleep(NAP)
        if not self._control.closed:
            self._control.send(Finished())

    def _accept(self, job: _Job) -> bool:
        """Say where a request's state belongs; false while there is no memory for it."""
        if job.room.status is statelink.Status.FAILED:
            return True
        try:
            job.held = held = self._pools.allocate(job.expected.tokens)
        except OutOfItemsError:
            return False
        try:
            job.room.accept({KV: held.pages, MAMBA: [held.slot], METADATA: [held.row]})
        except ClosedError:
            # It failed meanwhile. The reason is the room's, and the loop reports it.
            if job.room.reason is None:
                raise
        return True

    def _look(self) -> None:
        """Take in what changed: requests that arrived or failed, and memory that became quiet."""
        for room in self._link.changes():
            job = self._jobs.get(room.room)
            if job is None:
                continue
            if job.over:
                self._release(job)
            elif room.status is statelink.Status.FAILED:
                self._control.send(Failed(room.room, str(room.reason)))
                self._release(job)
            elif room.status is statelink.Status.SUCCEEDED and not job.arrived:
                job.arrived = True
                moved = {name: Count(each.nbytes, each.blocks) for name, each in room.report.moved.items()}
                self._control.send(Arrived(room.room, job.arrived_at, moved))
                self._arrived.append(job)

    def _decode(self, job: _Job, count: int) -> None:
        expected, held = job.expected, job.held
        assert held is not None
        self._zero(expected.sabotage, held)
        contents = fingerprints(self._pools, held, expected.tokens)
        try:
            found = self._engine.decode(held.pages, held.slot, held.row, room=expected.room, count=count)
        except RowError as error:
            self._control.send(Refused(expected.room, str(error), contents))
        else:
            self._control.send(answered(expected.room, found, contents))
        self._release(job)

    def _release(self, job: _Job) -> None:
        """Give memory back, but not before Statelink says that nothing can write it any more."""
        job.over = True
        if not job.room.quiesced:
            return
        if job.held is not None:
            self._pools.release(job.held)
        del self._jobs[job.expected.room]

    def _check(self, sabotage: str) -> None:
        known = [label(layout) for layout in self._pools.layouts()]
        if sabotage and sabotage not in known:
            raise StoppedError(f"no pool named {sabotage!r} to zero; there are {', '.join(known)}")

    def _zero(self, sabotage: str, held: Allocation) -> None:
        for layout in self._pools.layouts():
            if label(layout) == sabotage:
                layout.raw()[list(held.ids(layout.index))] = 0
