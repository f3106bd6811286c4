"""Prefill's process: computes prompts and pushes their state while it computes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import statelink
from statelink.errors import ClosedError
from statelink_demo.allocator import OutOfItemsError
from statelink_demo.fingerprint import fingerprints
from statelink_demo.inventory import KV, MAMBA, METADATA
from statelink_demo.linking import linked
from statelink_demo.messages import Computed, Failed, Finished, Ready, Sent, Serve, Start
from statelink_demo.model import build_model
from statelink_demo.pools import StatePools
from statelink_demo.prefill import PrefillEngine, PrefillRequest
from statelink_demo.runtime import configure_torch
from statelink_demo.shape import StateShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelink_demo.control import Control

__all__ = ["run"]

NAP = 0.001
"""Seconds between looks at the link when there is nothing to compute."""


def run(control: Control, start: Start) -> None:
    """Serve prompts until the parent hangs up."""
    configure_torch()
    model = build_model(start.seed)
    pools = StatePools(StateShape.of(model.config), pages=64, slots=8, rows=8, seed=1)
    with linked("prefill", start, model, pools) as link:
        control.send(Ready(link.address))
        server = _Server(control, link, PrefillEngine(model, pools, chunk_tokens=start.chunk_tokens))
        while (command := control.receive(Serve)) is not None:
            server.serve(command)


@dataclass(eq=False)
class _Job:
    """One request: what the engine knows of it, and what Statelink does."""

    request: PrefillRequest
    room: statelink.Sending
    pushes: dict[str, int] = field(default_factory=dict)
    pushed: dict[str, float] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    reported: bool = False

    @property
    def over(self) -> bool:
        return self.room.status in (statelink.Status.SUCCEEDED, statelink.Status.FAILED)

    def push(
        self,
        items: Mapping[str, Sequence[int]],
        span: tuple[int, int],
        *,
        layers: tuple[int, int] | None = None,
        last: bool,
    ) -> None:
        for name in items:
            self.pushes[name] = self.pushes.get(name, 0) + 1
            self.pushed[name] = time.monotonic()
        try:
            self.room.push(items, span=span, layers=layers, last=last)
        except ClosedError:
            # It failed meanwhile. The reason is the room's, and the loop reports it.
            if self.room.reason is None:
                raise


class _Server:
    def __init__(self, control: Control, link: statelink.Link, engine: PrefillEngine) -> None:
        self._control = control
        self._link = link
        self._engine = engine
        self._jobs: dict[int, _Job] = {}
        engine.on_chunk = self._on_chunk
        engine.on_layer = self._on_layer
        self._by_layer = False

    def serve(self, command: Serve) -> None:
        """Compute prompts, a chunk of each in turn; admit the next as soon as memory is released."""
        self._by_layer = command.by_layer
        waiting = deque(command.requests)
        while (waiting or self._jobs) and not self._control.closed:
            while waiting:
                room = waiting[0].room
                try:
                    request = self._engine.admit(room, waiting[0].prompt)
                except OutOfItemsError:
                    break
                self._jobs[room] = _Job(request, self._link.send(room, request.tokens))
                waiting.popleft()
            if not self._compute():
                time.sleep(NAP)
            self._reap()
        if not self._control.closed:
            self._control.send(Finished())

    def _compute(self) -> bool:
        """Compute a chunk of every unfinished prompt; whether there was one."""
        unfinished = [job for job in self._jobs.values() if not job.request.done and not job.over]
        for job in unfinished:
            self._engine.step(job.request)
            self._control.send(Computed(job.request.room))
        return bool(unfinished)

    def _reap(self) -> None:
        """Report rooms that ended, and release memory that nothing reads any more."""
        for room in self._link.changes():
            job = self._jobs.get(room.room)
            if job is None or not job.over:
                continue
            if not job.reported:
                job.reported = True
                if room.reason is not None:
                    self._control.send(Failed(room.room, str(room.reason)))
                else:
                    self._control.send(Sent(room.room, job.pushes, job.pushed, job.contents))
            if room.quiesced:
                self._engine.release(job.request)
                del self._jobs[room.room]

    def _on_layer(self, request: PrefillRequest, layer: int, start: int, stop: int) -> None:
        """During the forward pass: keys and values of every chunk; of a linear layer, the state at the end."""
        if not self._by_layer:
            return
        job, held = self._jobs[request.room], request.allocation
        if layer in self._engine.pools.kv.keys:
            job.push({KV: self._pages(request, start, stop)}, (start, stop), layers=(layer, layer + 1), last=False)
        elif stop == request.tokens:
            job.push({MAMBA: [held.slot]}, (start, stop), layers=(layer, layer + 1), last=False)

    def _on_chunk(self, request: PrefillRequest, start: int, stop: int) -> None:
        """After the forward pass: whatever has not been pushed by layers."""
        job, held = self._jobs[request.room], request.allocation
        items: dict[str, Sequence[int]] = {}
        if not self._by_layer:
            items[KV] = self._pages(request, start, stop)
            if request.done:
                items[MAMBA] = [held.slot]
        if request.done:
            items[METADATA] = [held.row]
        if items:
            job.push(items, (start, stop), last=request.done)
        if request.done:
            job.contents = fingerprints(self._engine.pools, held, request.tokens)

    def _pages(self, request: PrefillRequest, start: int, stop: int) -> tuple[int, ...]:
        """Pages of the tokens `[start, stop)`, which begin on a page."""
        pools = self._engine.pools
        return request.allocation.pages[start // pools.page_size : pools.pages_for(stop)]
