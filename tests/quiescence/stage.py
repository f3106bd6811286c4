"""Two engines in processes of their own, and what both sides' rooms came to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.quiescence.meddling import shared
from tests.quiescence.pattern import Memory, Share

__all__ = ["Outcome", "Stage"]

ROOT = Path(__file__).parents[2]
SIDES = ("prefill", "decode")
SLICE = 128 << 10
"""Bytes given to a library at once: one page of both layers."""


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        seed: It was drawn from.
        aborted: Rooms that failed on at least one side, per phase and who aborted.
        in_flight: Rooms that failed while a transfer of theirs was in flight.
        ended: Per side, rooms by how they ended.
        reasons: Per side, failed rooms by code.
        checked: Bytes looked at.
        foreign: Bytes among them that were somebody else's.
        wrong: Rooms that succeeded on decode without all of their bytes.
        found: Some of them, in words.
        stuck: Per side, rooms that stay in quarantine.
        held: Per side, their bytes.
        quarantined: Per side, most bytes in quarantine at once.
        waited: Per side, most seconds between the end of a room and the moment when its memory was given back.
    """

    seed: int
    aborted: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    ended: dict[str, dict[str, int]] = field(default_factory=dict)
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    checked: int = 0
    foreign: int = 0
    wrong: int = 0
    found: list[str] = field(default_factory=list)
    stuck: dict[str, list[int]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, int] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Rooms that failed on prefill."""
        return self.ended["prefill"].get("failed", 0)

    def hits(self, phase: str, by: str = "") -> int:
        """Rooms that were aborted in a phase."""
        return sum(self.aborted[f"{side}: {phase}"] for side in ((by,) if by else SIDES))

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in vars(self).items())


class Engine:
    """One process.

    Args:
        role: Its side.
        backend: Name of the backend.
        pages: Pages of its pool.
        marks: Descriptor of what both sides share.
        environment: Beside this process's own.
    """

    def __init__(self, role: str, backend: str, pages: int, marks: int, environment: dict[str, str]) -> None:
        self.role = role
        rows = pages // 4
        self._memory = os.memfd_create(role)
        os.truncate(self._memory, Memory.size(pages, rows))
        self.memory = Memory(self._memory, pages, rows)
        settings = {"role": role, "backend": backend, "memory": self._memory, "pages": pages, "rows": rows}
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.quiescence.side", json.dumps({**settings, "marks": marks})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            pass_fds=(self._memory, marks),
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    def ask(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.role} ended: {self.process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.ask(do, **arguments)
        return self.answer()

    def foreign(self, free: list[tuple[str, int, int]]) -> int:
        """Bytes of items that nobody uses that are not what their last owner wrote, as seen from here."""
        return sum(self.memory.foreign(Share(component, item), key) for component, item, key in free)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        os.close(self._memory)


class Stage:
    """A prefill and a decode engine. A context manager that ends them.

    Args:
        backend: Name of the backend.
        pages: Pages of each pool.
        environment: Of both processes, beside this one's.
    """

    def __init__(self, backend: str, pages: int = 256, environment: dict[str, str] | None = None) -> None:
        self.backend = backend
        self._marks = os.memfd_create("marks")
        os.truncate(self._marks, 4096)
        self.prefill, self.decode = (Engine(role, backend, pages, self._marks, environment or {}) for role in SIDES)
        self.engines = (self.prefill, self.decode)
        self.address = ""

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        for engine in self.engines:
            engine.end()
        os.close(self._marks)

    def both(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        for engine in self.engines:
            engine.ask(do, **arguments)
        return [engine.answer() for engine in self.engines]

    def open(self, *, unchecked: bool = False, **config: Any) -> None:
        """Open both links, and let two rooms succeed: from then on, they know each other."""
        config = {"slice_bytes": SLICE, "deadline": 60.0, **config}
        self.address = self.both("open", config=config, unchecked=unchecked)[0]["address"]
        outcome = self.run(1, 2, aborts=0.0)
        assert outcome.ended == {side: {"succeeded": 2} for side in SIDES}, outcome

    def begin(self, seed: int, rooms: int, aborts: float = 0.85, breaks: float = 0.0, unchecked: bool = False) -> None:
        """Let rooms be played."""
        shared(self._marks)[:16] = bytes(16)
        drawn = {"seed": seed, "rooms": rooms, "aborts": aborts, "breaks": breaks, "unchecked": unchecked}
        self._seed = seed
        for engine in self.engines:
            engine.ask("run", peer=self.address, **drawn)

    def finish(self) -> Outcome:
        """Wait until both sides have come to rest, and look at every byte."""
        outcome = Outcome(self._seed)
        ran = [engine.answer() for engine in self.engines]
        time.sleep(0.2)  # what is late has time to land
        for engine, run, seen in zip(self.engines, ran, self.both("finish"), strict=True):
            outcome.aborted.update(run["phases"])
            outcome.in_flight += run["left"]
            outcome.ended[engine.role] = run["ended"]
            outcome.reasons[engine.role] = run["reasons"]
            outcome.checked += seen["checked"]
            outcome.foreign += seen["foreign"]
            outcome.wrong += seen["wrong"]
            outcome.found += [f"{engine.role}: {each}" for each in seen["found"]]
            outcome.stuck[engine.role] = seen["stuck"]
            outcome.held[engine.role] = seen["stuck_bytes"]
            outcome.quarantined[engine.role] = seen["quarantined"]
            outcome.waited[engine.role] = round(seen["waited"], 3)
            outcome.foreign += engine.foreign(seen["free"])
        return outcome

    def run(self, seed: int, rooms: int, **drawn: Any) -> Outcome:
        """Play rooms."""
        self.begin(seed, rooms, **drawn)
        return self.finish()
