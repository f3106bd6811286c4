"""Two processes with the same pools and one connector, as the measuring process sees them."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from engine_processes import free_port
from support.process import PATIENCE, START, Host, Process

from . import sides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .sides import Played

LONG = 300.0
"""Seconds that a call may take that fills memory, or plays many requests."""
BEGIN, SETTLE = 0.005, 0.02
"""Seconds from a command to the moment when both sides begin, and between a change of pairs and the next command."""


class Pair:
    """One connector's two processes. They stand still unless it is their turn, so that no thread of theirs disturbs.

    Args:
        connector: ``statelink``, ``nixl`` or ``mooncake``; without one, the processes have no ranks.
        backend: Of Statelink.
        model: The folder of a model.
        options: Of Statelink's backend.
        interval: Seconds of the interpreter's switch interval, of either connector.
    """

    def __init__(
        self,
        connector: str,
        backend: str,
        model: Path,
        options: dict[str, Any] | None = None,
        interval: float | None = None,
    ) -> None:
        self.name = f"{connector}-{backend}" if connector == "statelink" else connector or "bare"
        self._config: dict[str, Any] = {"backend": backend, "options": options or {}, "liveness": 60.0}
        self._interval = interval
        if connector == "statelink" and interval is not None:
            self._config["switch_interval"] = interval
        self._rooms = itertools.count(1)
        self.sides = [Process(role) for role in ("prefill", "decode")]
        for side in self.sides:
            # This imports SGLang. Only a rank has an agent, and threads.
            side.start(Host.publish, side.name, connector or "nixl", str(model))

    def ready(self) -> None:
        """Wait until SGLang is imported."""
        for side in self.sides:
            side.result(START)
        if self._interval is not None and "switch_interval" not in self._config:
            self.both(sides.set_interval, self._interval)
        self.rest()

    def prepare(self, name: str, in_flight: int) -> None:
        """Make the pools of a workload and a rank on each side."""
        self.go_on()
        port = free_port()
        made = ("benchmarks.sglang.workloads", "make", {"name": name, "in_flight": in_flight})
        self.both(Host.start, name, made, port, self._config, patience=LONG)
        self.both(sides.prepare, name, name, in_flight, patience=LONG)
        self.rest()

    def play(self, name: str, rooms: int, in_flight: int, work: Sequence[int] = (0, 0)) -> tuple[Played, Played]:
        """Play so many requests; what prefill and decode measured."""
        first = next(self._rooms) * 1_000_000
        at = time.monotonic() + BEGIN
        for side, iterations in zip(self.sides, work, strict=True):
            side.start(sides.play, name, at, first, rooms, in_flight, iterations)
        prefill, decode = (side.result(LONG) for side in self.sides)
        return prefill, decode

    def mix(self, name: str, counts: Sequence[int]) -> list[list[tuple[float, float]]]:
        """Play so many requests of each slot; when each began and ended on decode."""
        call = sides.mix, name, time.monotonic() + BEGIN, next(self._rooms) * 1_000_000, counts
        times: list[list[tuple[float, float]]] = self.both(*call, patience=LONG)[1]
        return times

    def idle(self, work: Sequence[int], turns: int = 100) -> list[float]:
        """Seconds of a turn of each side's loop while no requests are there."""
        at = time.monotonic() + BEGIN
        for side, iterations in zip(self.sides, work, strict=True):
            side.start(sides.idle, at, iterations, turns)
        return [side.result() for side in self.sides]

    def check(self, name: str) -> None:
        """Look at every byte.

        Raises:
            AssertionError: Some are wrong.
        """
        self.go_on()
        self.sides[1].start(sides.check, name)
        wrong, stray = self.sides[1].result(LONG)
        self.rest()
        if wrong or stray:
            raise AssertionError(f"{self.name}, {name}: {wrong} items are wrong, {stray} changed that nobody named")

    def both(self, function: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> list[Any]:
        """Call a function of `sides` on both sides."""
        for side in self.sides:
            side.start(function, *arguments)
        return [side.result(patience) for side in self.sides]

    def go_on(self) -> None:
        """It is this pair's turn."""
        for side in self.sides:
            side.go_on()
        time.sleep(SETTLE)

    def rest(self) -> None:
        """It is another pair's turn."""
        time.sleep(SETTLE)
        for side in self.sides:
            side.stop()

    def close(self) -> None:
        for side in self.sides:
            side.end()
