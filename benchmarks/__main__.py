"""Every benchmark of requests: prints each row, and writes all of them as JSON.

    python -m benchmarks [--suite handoff rooms mixed long_line unequal growth] [--backend tcp nixl mooncake]
                         [--rounds 30] [--out build/bench]

A row's ratios are medians over pairs that were taken in turn, with the bounds of 95 of 100 resamples. ``noise`` is the
ratio of a thing to itself. Nothing is asserted. ``results.json`` has the rows, and what the machine is. Without
``--suite``, `long_line` is left out where it cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import growth, handoff, long_line, mixed, rooms, unequal
from .busy import BUSY, intervals
from .namespaces import missing
from .rows import show

Row = dict[str, Any]
E64 = 64


def handoffs(backend: str, rounds: int) -> Iterator[Row]:
    """A, B and C, quiet and beside a busy engine."""
    for name in handoff.WORKLOADS:
        for busy in BUSY[1:]:
            for interval in intervals(busy):
                yield handoff.measure(name, {"backend": backend, "switch_interval": interval}, rounds, busy)


def small(backend: str, rounds: int) -> Iterator[Row]:
    """E, alone and many in flight, quiet and beside a busy engine."""
    for busy in BUSY:
        for in_flight in (1, E64):
            for interval in intervals(busy):
                count = rounds * (10 if in_flight == 1 else 500)
                yield rooms.measure(backend, count, in_flight, busy, switch_interval=interval)


def mixes(backend: str, rounds: int) -> Iterator[Row]:
    """Small requests beside large ones, from one sender and from four."""
    for kind in mixed.KINDS:
        for senders in mixed.SENDERS:
            yield mixed.measure(backend, kind, senders, max(1, rounds // 6))


def lines(backend: str, rounds: int) -> Iterator[Row]:
    """Requests over long lines, beside plain streams."""
    for line in long_line.LINES:
        yield long_line.measure(backend, line, max(1, rounds // 6))


def widths(backend: str, rounds: int) -> Iterator[Row]:
    """D."""
    yield unequal.measure(backend, 128, rounds, 64 << 20)


SUITES: dict[str, Callable[[str, int], Iterator[Row]]] = {
    "handoff": handoffs,
    "rooms": small,
    "mixed": mixes,
    "long_line": lines,
    "unequal": widths,
    "growth": growth.rows,
}


def machine() -> Row:
    """What the numbers depend on."""
    packages = ("statelink", "numpy", "pyzmq")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=SUITES)
    parser.add_argument("--backend", nargs="+", default=["tcp", "nixl", "mooncake"])
    parser.add_argument("--rounds", type=int, default=30, help="pairs of each ratio")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    suites = arguments.suite or list(SUITES)
    if not arguments.suite and (problem := missing()):
        print(f"skipped: long_line: {problem}", file=sys.stderr)
        suites.remove("long_line")
    for suite in suites:
        for backend in arguments.backend:
            for row in SUITES[suite](backend, arguments.rounds):
                show(row)
                found.append({"suite": suite, **row})
                # After each row, so that an interrupted run leaves what it has.
                text = json.dumps({"machine": machine(), "rounds": arguments.rounds, "rows": found}, indent=1)
                (arguments.out / "results.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
