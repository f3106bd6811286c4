"""Measures one backend: requests, the library by itself, and a copy, over sizes and numbers of blocks."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ._ends import End, FailedError
from ._messages import MOST_INDICES, Close, Copy, Know, Move, Open, Raw, Receive, Send, Settle

__all__ = ["Cell", "Found", "Plan", "measure"]

ANSWER_SECONDS = 120.0
WARM = 2
GRACE_SECONDS = 1.0
"""Seconds in which it shows that a side has gone, after another one has lost it."""
LEAST, MOST = 3, 400
"""Fewest and most requests of a cell."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        sizes: Bytes of a block.
        counts: Blocks of a request.
        scattered: Whether blocks are in random order over the pools; otherwise they are side by side.
        seconds: How long the requests of one cell are measured, roughly.
        most: Most bytes of a request. Cells above are left out.
        memory: Memory kind, and what allocates it.
        raw: Whether the library is measured by itself.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    scattered: bool = True
    seconds: float = 1.0
    most: int = 256 << 20
    memory: tuple[str, str] = ("dram", "")
    raw: bool = True

    def cells(self) -> list[tuple[int, int]]:
        """Size and number of blocks of each cell."""
        return [(size, count) for size in self.sizes for count in self.counts if size * count <= self.most]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one way to move a cell's bytes.

    Attributes:
        median: Median.
        p99: 99th percentile; of fewer than 100 rounds, nearly the largest.
        least: The shortest.
        rounds: How many were measured.
    """

    median: float
    p99: float
    least: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times | None:
        """Of some rounds; ``None`` if there are none."""
        if not seconds:
            return None
        p99 = float(np.quantile(seconds, 0.99))
        return cls(median=statistics.median(seconds), p99=p99, least=min(seconds), rounds=len(seconds))


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One size and number of blocks.

    Attributes:
        block: Bytes of a block.
        count: Number of blocks.
        request: Times from `receive` on decode until the request has succeeded.
        raw: Times of the library by itself, at the source; ``None`` if the backend does not offer it.
        copy: Times of a copy of the same blocks inside decode's process, on one thread; ``None`` for device memory.
        copied: Seconds of all these copies together, and those for which their thread had a core.
    """

    block: int
    count: int
    request: Times
    raw: Times | None
    copy: Times | None
    copied: tuple[float, float]

    @property
    def nbytes(self) -> int:
        """Bytes of a request."""
        return self.block * self.count


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a backend.

    Attributes:
        backend: Its name.
        transports: What carried the bytes, as far as it is known.
        cells: In the order of the plan.
        raw: Why the library was not measured by itself; empty if it was, or was not meant to be.
        error: Why it ended early; empty if it did not.
        hint: What to do about that.
    """

    backend: str
    transports: tuple[str, ...]
    cells: tuple[Cell, ...]
    raw: str = ""
    error: str = ""
    hint: str = ""

    @property
    def waited(self) -> float:
        """The part of the copies' time for which their thread waited for a core, because others used it."""
        took, cpu = (sum(each.copied[part] for each in self.cells) for part in (0, 1))
        return max(0.0, 1 - cpu / took) if took else 0.0


class _Run:
    """The measurements of one backend. Room ids are counted up, so that none is used twice."""

    def __init__(self, backend: str, options: Mapping[str, Any], plan: Plan, source: End, target: End) -> None:
        self._backend, self._options = backend, dict(options)
        self._plan, self._source, self._target = plan, source, target
        self._room = 1
        self.transports: set[str] = set()
        self.no_raw = ""

    def cells(self, config: Mapping[str, Any], host: str) -> Iterator[Cell]:
        """Measure each cell.

        Args:
            config: Further keys of the configuration of links on this host.
            host: Host under which the source reaches the target.
        """
        opened, address = 0, ""
        for block, count in self._plan.cells():
            if block != opened:
                most = max(number for size, number in self._plan.cells() if size == block)
                told = Open(
                    block=block,
                    count=most,
                    memory=self._plan.memory,
                    backend=self._backend,
                    options=self._options,
                )
                address = self._source.ask(told, ANSWER_SECONDS)["address"]
                self._target.ask(msgspec.structs.replace(told, config=dict(config)), ANSWER_SECONDS)
                opened = block
            yield self._cell(block, count, address, host)
        for end in (self._target, self._source):
            end.ask(Close(), ANSWER_SECONDS)

    def _cell(self, block: int, count: int, address: str, host: str) -> Cell:
        warm = self._receive(WARM, address, count, compared=True)
        most = min(MOST, MOST_INDICES // count)
        rounds = min(most, max(LEAST, int(self._plan.seconds / max(min(warm), 1e-6))))
        request = Times.of(self._receive(rounds, address, count, compared=False))
        assert request is not None
        raw = self._raw(rounds, count, host) if self._plan.raw else []
        told = Copy(rounds=rounds, pages=count, scattered=self._plan.scattered)
        answer = self._target.ask(told, ANSWER_SECONDS)
        seconds: list[float] = answer["seconds"]
        copied = sum(seconds), float(answer["cpu"])
        return Cell(block=block, count=count, request=request, raw=Times.of(raw), copy=Times.of(seconds), copied=copied)

    def _receive(self, rounds: int, address: str, count: int, *, compared: bool) -> list[float]:
        patience, first, scattered = ANSWER_SECONDS + self._plan.seconds, self._room, self._plan.scattered
        self._room += rounds
        send = Send(first=first, rooms=rounds, pages=count, scattered=scattered, lasts=patience)
        self._source.ask(send, ANSWER_SECONDS)
        receive = Receive(first=first, rooms=rounds, pages=count, scattered=scattered, peer=address, compared=compared)
        answer = self._target.ask(receive, patience)
        self._source.ask(Settle(), patience)
        self.transports.update(answer["transports"])
        if answer["right"] is False:
            raise FailedError("a request succeeded, and other bytes arrived than were sent", hint="statelink conform")
        return list(answer["seconds"])

    def _raw(self, rounds: int, count: int, host: str) -> list[float]:
        """Times of the library by itself. If it cannot be measured, there are none, and ``no_raw`` says why."""
        try:
            return self._alone(rounds, count, host)
        except FailedError as error:
            self.no_raw = str(error).partition("\nhint:")[0]
            return []

    def _alone(self, rounds: int, count: int, host: str) -> list[float]:
        there = self._target.ask(Raw(host=host), ANSWER_SECONDS)
        if there["raw"] is None or self._source.ask(Raw(host=host), ANSWER_SECONDS)["raw"] is None:
            self.no_raw = "the backend has no `raw`"
            return []
        raw = base64.b64decode(there["raw"])
        self._source.ask(Know(raw=raw, at=there["at"], pages=count, scattered=self._plan.scattered), ANSWER_SECONDS)
        self._source.ask(Move(rounds=WARM), ANSWER_SECONDS)
        seconds = self._source.ask(Move(rounds=rounds), ANSWER_SECONDS + self._plan.seconds)["seconds"]
        return list(seconds)


def measure(
    backend: str,
    options: Mapping[str, Any],
    plan: Plan,
    ends: tuple[End, End],
    *,
    config: Mapping[str, Any],
    host: str,
    say: Callable[[int, Cell], object],
) -> Found:
    """Measure one backend. Blocks until it is done, or one of the sides fails.

    Args:
        backend: Its name.
        options: Its options, on both sides.
        plan: What is measured.
        ends: The source side and the target side.
        config: Further keys of the configuration of links on this host.
        host: Host under which the source reaches the target.
        say: Called after each cell with the number of cells that are done, and the cell.
    """
    run = _Run(backend, options, plan, *ends)
    cells: list[Cell] = []
    error, hint = "", ""
    try:
        for cell in run.cells(config, host):
            cells.append(cell)
            say(len(cells), cell)
    except FailedError as caught:
        failed = _lost(ends) or caught
        error, hint = str(failed).partition("\nhint:")[0], failed.hint
    transports = tuple(sorted(run.transports))
    return Found(backend=backend, transports=transports, cells=tuple(cells), raw=run.no_raw, error=error, hint=hint)


def _lost(ends: tuple[End, End]) -> FailedError | None:
    """The side that has gone, for which the other one may be blamed; ``None`` if both are there."""
    until = time.monotonic() + GRACE_SECONDS
    while True:
        for end in ends:
            if gone := end.gone():
                return gone
        if time.monotonic() > until:
            return None
        time.sleep(0.02)
