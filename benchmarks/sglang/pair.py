"""Two processes with the same pools and one connector, as the measuring process sees them."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from engine_processes import free_port
from support.process import START, Process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .sides import Played

SIDES = "benchmarks.sglang.sides"
BEGIN, SETTLE = 0.005, 0.02
"""Seconds from a command to the moment when both sides begin, and between a change of pairs and the next command."""


class Pair:
    """One connector's two processes. They stand still unless it is their turn, so that no thread of theirs disturbs.

    Args:
        connector: ``statelink``, ``nixl`` or ``mooncake``; without one, the processes have no ranks.
        backend: Of Statelink.
        model: The folder of a model.
        folder: For logs.
        options: Of Statelink's backend.
        interval: Seconds of the interpreter's switch interval, of either connector.
    """

    def __init__(
        self,
        connector: str,
        backend: str,
        model: Path,
        folder: Path,
        options: dict[str, Any] | None = None,
        interval: float | None = None,
    ) -> None:
        self.name = f"{connector}-{backend}" if connector == "statelink" else connector or "bare"
        self._config: dict[str, Any] = {"backend": backend, "options": options or {}, "liveness": 60.0}
        self._interval = interval
        if connector == "statelink" and interval is not None:
            self._config["switch_interval"] = interval
        self._rooms = itertools.count(1)
        self.sides = [Process(role, folder / f"{self.name}-{role}.log") for role in ("prefill", "decode")]
        for side in self.sides:
            # This imports SGLang. Only a rank has an agent, and threads.
            side.ask("publish", side.name, connector or "nixl", str(model))

    def ready(self) -> None:
        """Wait until SGLang is imported."""
        for side in self.sides:
            side.answer(START)
        if self._interval is not None and "switch_interval" not in self._config:
            self._both("run", SIDES, "set_interval", self._interval)
        self.rest()

    def prepare(self, name: str, in_flight: int) -> None:
        """Make the pools of a workload and a rank on each side."""
        self.go_on()
        port = free_port()
        made = ("benchmarks.sglang.workloads", "make", {"name": name, "in_flight": in_flight})
        self._both("start", name, made, port, self._config, patience=300.0)
        self._both("run", SIDES, "prepare", name, name, in_flight, patience=300.0)
        self.rest()

    def play(self, name: str, rooms: int, in_flight: int, work: Sequence[int] = (0, 0)) -> tuple[Played, Played]:
        """Play so many requests; what prefill and decode measured."""
        first = next(self._rooms) * 1_000_000
        at = time.monotonic() + BEGIN
        for side, iterations in zip(self.sides, work, strict=True):
            side.ask("run", SIDES, "play", name, at, first, rooms, in_flight, iterations)
        prefill, decode = (side.answer(300.0) for side in self.sides)
        return prefill, decode

    def mix(self, name: str, counts: Sequence[int]) -> list[list[tuple[float, float]]]:
        """Play so many requests of each slot; when each began and ended on decode."""
        call = ("run", SIDES, "mix", name, time.monotonic() + BEGIN, next(self._rooms) * 1_000_000, counts)
        times: list[list[tuple[float, float]]] = self._both(*call, patience=300.0)[1]
        return times

    def idle(self, work: Sequence[int], turns: int = 100) -> list[float]:
        """Seconds of a turn of each side's loop while no requests are there."""
        at = time.monotonic() + BEGIN
        for side, iterations in zip(self.sides, work, strict=True):
            side.ask("run", SIDES, "idle", at, iterations, turns)
        return [side.answer() for side in self.sides]

    def check(self, name: str) -> None:
        """Look at every byte.

        Raises:
            AssertionError: Some are wrong.
        """
        self.go_on()
        wrong, stray = self.sides[1].call("run", SIDES, "check", name, patience=300.0)
        self.rest()
        if wrong or stray:
            raise AssertionError(f"{self.name}, {name}: {wrong} items are wrong, {stray} changed that nobody named")

    def both(self, function: str, *arguments: Any) -> list[Any]:
        """Call a function of `sides` on both sides."""
        return self._both("run", SIDES, function, *arguments)

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
            side.kill()

    def _both(self, *call: Any, patience: float = 90.0) -> list[Any]:
        for side in self.sides:
            side.ask(*call)
        return [side.answer(patience) for side in self.sides]
