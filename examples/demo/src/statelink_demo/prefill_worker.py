"""Prefill's process: computes prompts and pushes their state while it computes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import statelink
from statelink_demo.engine import PrefillEngine, PrefillRequest
from statelink_demo.inventory import linked
from statelink_demo.messages import Failed, Finished, Ready, Sent, Serve, Settings
from statelink_demo.model import build_model, configure_torch
from statelink_demo.pools import KV, MAMBA, METADATA, OutOfItemsError, StatePools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelink_demo.messages import Prompt
    from statelink_demo.processes import Pipe

__all__ = ["run"]

NAP = 0.01
"""Most seconds to wait for the link when there is nothing to compute."""


def run(pipe: Pipe, settings: Settings) -> None:
    """Serve prompts until the parent hangs up."""
    configure_torch()
    model = build_model(settings.seed)
    pools = StatePools(model.config, pages=64, slots=8, rows=8, seed=1)
    with linked("prefill", settings, model, pools) as link:
        pipe.send(Ready(link.address))
        server = _Server(pipe, link, PrefillEngine(model, pools))
        while (work := pipe.receive(Serve)) is not None:
            server.serve(work)


@dataclass(eq=False)
class _Job:
    """One request: what the engine knows of it, and what Statelink does."""

    request: PrefillRequest
    room: statelink.Sending
    pushed: dict[str, list[float]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
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
        last: bool = False,
    ) -> None:
        for name in items:
            self.pushed.setdefault(name, []).append(time.monotonic())
        self.room.push(items, span=span, layers=layers, last=last)


class _Server:
    def __init__(self, pipe: Pipe, link: statelink.Link, engine: PrefillEngine) -> None:
        self._pipe = pipe
        self._link = link
        self._engine = engine
        self._jobs: dict[int, _Job] = {}

    def serve(self, work: Serve) -> None:
        """Compute a chunk of each prompt in turn; admit the next prompt as soon as memory is released."""
        waiting = deque(work.requests)
        while waiting or self._jobs:
            while waiting and self._admit(waiting[0]):
                waiting.popleft()
            unfinished = [job for job in self._jobs.values() if not job.request.done and not job.over]
            for job in unfinished:
                self._compute(job, work.by_layer)
            self._reap(timeout=0 if unfinished else NAP)
        self._pipe.send(Finished())

    def _admit(self, prompt: Prompt) -> bool:
        """Open a request; false while there is no memory for it."""
        try:
            request = self._engine.admit(prompt.room, prompt.prompt)
        except OutOfItemsError:
            return False
        self._jobs[prompt.room] = _Job(request, self._link.send(prompt.room, tokens=len(prompt.prompt)))
        return True

    def _compute(self, job: _Job, by_layer: bool) -> None:
        """Compute a chunk, and push its state: layer by layer during the forward pass, or all of it afterwards."""
        request, held = job.request, job.request.held
        start, stop = request.span
        # A chunk begins on a page. Recurrent state is final, and pushed, at the end of the prompt.
        items: dict[str, Sequence[int]] = {
            KV: held.pages[start // self._engine.pools.page_size : self._engine.pools.pages_for(stop)]
        }
        if stop == len(request.prompt):
            items[MAMBA] = [held.slot]

        def push_layer(layer: int) -> None:
            name = KV if layer in self._engine.pools.k else MAMBA
            if name in items:
                job.push({name: items[name]}, (start, stop), layers=(layer, layer + 1))

        last = self._engine.step(request, push_layer if by_layer else None)
        rest: dict[str, Sequence[int]] = {} if by_layer else items
        if last:
            rest[METADATA] = [held.row]
        if rest:
            job.push(rest, (start, stop), last=last)
        if last:
            job.digests = self._engine.pools.digests(held, stop)

    def _reap(self, timeout: float) -> None:
        """Report rooms that ended, and release memory that nothing reads any more."""
        for room in self._link.changes(timeout):
            job = self._jobs.get(room.room)
            if job is None or not job.over:
                continue
            if not job.reported:
                job.reported = True
                if room.reason is not None:
                    self._pipe.send(Failed(room.room, str(room.reason)))
                else:
                    self._pipe.send(Sent(room.room, job.pushed, job.digests))
            if room.quiesced:
                self._engine.pools.release(job.request.held)
                del self._jobs[room.room]
