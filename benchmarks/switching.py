"""What the interpreter's switch interval costs and brings beside an engine, with requests at a fixed rate.

    python -m benchmarks.switching [--backend tcp nixl] [--load E:1:20 E:64:400 A:1:20 B:1:2] [--busy python compute]
                                   [--interval 5 2 1 0.5 0.2] [--rounds 3] [--seconds 2] [--out build/bench]

A load such as ``E:16:100`` is the workload (see `benchmarks.handoff`; E is of `benchmarks.rooms`), how many requests
arrive at once, and how many arrive in a second. A request's time counts from the moment when it arrives, also where
those before it take so long that it starts late. Beside prefill's link, a thread plays the engine's loop:

    python    a turn is 0.1 ms of Python, again and again
    compute   a turn is 1 ms of Python, and 2 ms of a digest in C, without the interpreter

The intervals take their turns, forwards and backwards. For each: median and 99th percentile of a request's time, in
milliseconds, and its ratio to that with the first interval; turns of the loop a second, beside the requests and alone;
the 99th percentile of a turn, and the worst one; processor time of prefill's process for each request, without the
loop's, and of decode's. With the two numbers of turns, ``lost`` is what a request takes of the loop: milliseconds of
turns that the loop does not come to, for each request. Writes ``switching.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import state

from . import rooms
from .handoff import DIM, HEADS, TOKENS, WORKLOADS
from .pairs import ratio
from .rows import show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

LOADS = ("E:1:20", "E:1:100", "E:1:400", "E:16:100", "E:16:400", "E:64:400", "A:1:20", "A:1:100", "A:16:100", "B:1:2")
INTERVALS = (5.0, 2.0, 1.0, 0.5, 0.2)
BUSY = ("python", "compute")
ENDED = statelink.Status.SUCCEEDED, statelink.Status.FAILED
BEGIN = 0.4
"""Seconds from a command to the first request. In this time, the loop's turns alone are measured."""
PYTHON_SECONDS = {"python": 1e-4, "compute": 1e-3}
"""What one turn of the loop computes in Python."""


class Load(NamedTuple):
    """What arrives.

    Attributes:
        workload: Its name.
        burst: How many requests arrive at once.
        rate: How many arrive in a second.
    """

    workload: str
    burst: int
    rate: float

    @classmethod
    def read(cls, text: str) -> Load:
        """From text such as ``E:16:100``."""
        name, burst, rate = text.split(":")
        return cls(name, int(burst), float(rate))

    def arrivals(self, seconds: float) -> list[float]:
        """When each request arrives, in seconds from the beginning."""
        bursts = max(1, round(seconds * self.rate / self.burst))
        return [number * self.burst / self.rate for number in range(bursts) for _ in range(self.burst)]


class Pools:
    """The pools of one side, with space for so many requests at once."""

    def __init__(self, workload: str, name: str, requests: int) -> None:
        self.tokens, self.items = rooms.TOKENS, list[dict[str, Any]]()
        self.memory: Any  # what the link does not keep
        if workload == "E":
            small = rooms.Pools(name, requests)
            self.inventory, self.items, self.memory = small.inventory, small.items, small
            return
        given = WORKLOADS[workload]
        self.tokens = given.pages * TOKENS
        count = given.pages * requests
        shape = (count, TOKENS, HEADS, DIM // 2)
        kv = {n: (np.zeros(shape, np.int16), np.zeros(shape, np.int16)) for n in range(given.layers)}
        parts = [state.kv_pages(kv, heads=HEADS)]
        if given.states:
            conv = {n: np.zeros((requests, 4096, 6), np.uint8) for n in range(4)}
            ssm = {n: np.zeros((requests, 16, 64, 32), np.float32) for n in range(4)}
            row = np.zeros((requests, 64), np.uint8)
            parts += [state.mamba_slots(conv=conv, ssm=ssm, heads=16), state.aux_rows({"row": row})]
            self.memory = kv, conv, ssm, row
        else:
            self.memory = kv
        self.inventory = state.describe(name, parts)
        order = np.random.default_rng(len(name)).permutation(count) if given.random else np.arange(count)
        for number, pages in enumerate(order.reshape(requests, given.pages)):
            self.items.append({"kv": pages, **({"mamba": [number], "aux": [number]} if given.states else {})})


class Loop:
    """A thread that plays the engine's loop in turns, and notes when each ended."""

    def __init__(self, busy: str) -> None:
        self.cpu = 0.0
        self._passes = _passes(PYTHON_SECONDS[busy])
        self._digested = bytes(_digested(2 * PYTHON_SECONDS[busy]) if busy == "compute" else 0)
        self._ends: list[float] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            for _ in range(self._passes):
                pass
            if self._digested:
                hashlib.sha256(self._digested)  # lets go of the interpreter
            self._ends.append(time.monotonic())
            self.cpu = time.thread_time()

    def take(self) -> list[float]:
        """When turns ended since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def stop(self) -> None:
        self._stop = True
        self._thread.join()


def _passes(seconds: float) -> int:
    """Passes of an empty loop that take so long."""
    many = 2_000_000
    began = time.perf_counter()
    for _ in range(many):
        pass
    return max(1, int(many * seconds / (time.perf_counter() - began)))


def _digested(seconds: float) -> int:
    """Bytes of which a digest takes so long."""
    many = bytes(1 << 24)
    began = time.perf_counter()
    hashlib.sha256(many)
    return max(4096, int(len(many) * seconds / (time.perf_counter() - began)))


class Side(NamedTuple):
    """What one process measured.

    Attributes:
        took: Seconds of each request.
        turns: Seconds of each turn of the loop beside the requests.
        alone: Seconds of a turn before them.
        seconds: From the first arrival to the last end.
        cpu: Seconds of processor time, without the loop's.
    """

    took: list[float]
    turns: list[float]
    alone: float
    seconds: float
    cpu: float


def play(
    link: statelink.Link, pools: Pools, peer: str, first: int, began: float, arrivals: Sequence[float]
) -> list[float]:
    """Open each request when it arrives, or as soon as there is space; the time of each, from its arrival."""
    free = list(range(len(pools.items)))
    live: dict[int, tuple[statelink.Room, int, float]] = {}
    took: list[float] = []
    opened = 0
    while len(took) < len(arrivals):
        while free and opened < len(arrivals) and time.monotonic() >= began + arrivals[opened]:
            slot = free.pop()
            if peer:
                room: statelink.Room = link.receive(first + opened, peer, pools.tokens, pools.items[slot])
            else:
                room = link.send(first + opened, pools.tokens)
                room.push(pools.items[slot])
            live[first + opened] = room, slot, began + arrivals[opened]
            opened += 1
        next_one = began + arrivals[opened] - time.monotonic() if free and opened < len(arrivals) else 1.0
        for room in link.changes(max(0.0, min(next_one, 1.0))):
            held = live.get(room.room)
            if held is None or not room.quiesced or room.status not in ENDED:
                continue
            room.check()
            took.append(time.monotonic() - held[2])
            del live[room.room]
            free.append(held[1])
    return took


def prefill(backend: str, load: Load, seconds: float, busy: str, pipe: Connection) -> None:
    """The sending process, whose interval is changed."""
    pools = Pools(load.workload, "prefill", load.burst)
    config = {"role": "prefill", "backend": backend, "deadline": 60.0}
    with statelink.open(config, pools.inventory) as link:
        pipe.send(link.address)
        loop = Loop(busy)
        while (asked := pipe.recv()) is not None:
            interval, first, began = asked
            sys.setswitchinterval(interval)
            loop.take()
            time.sleep(max(0.0, began - time.monotonic() - 0.02))
            alone = float(np.mean(np.diff(loop.take())))
            cpu, own = time.process_time(), loop.cpu
            play(link, pools, "", first, began, load.arrivals(seconds))
            spent = time.process_time() - cpu - (loop.cpu - own)
            took = time.monotonic() - began
            ends = [end for end in loop.take() if end >= began]
            pipe.send(Side([], np.diff(ends).tolist(), alone, took, spent))
        loop.stop()


def measure(
    backend: str, load: Load, busy: str, intervals: Sequence[float], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """One load over one backend, with each interval in turn: a row for each."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(backend, load, seconds, busy, theirs), daemon=True)
    process.start()
    theirs.close()
    pools = Pools(load.workload, "decode", load.burst)
    found: dict[float, list[tuple[Side, Side]]] = {each: [] for each in intervals}
    arrivals = load.arrivals(seconds)
    with statelink.open({"role": "decode", "backend": backend, "deadline": 60.0}, pools.inventory) as link:
        address, first = pipe.recv(), 1
        for number in range(-1, rounds):  # the first round touches the memory, and opens connections
            for interval in intervals if number % 2 else reversed(intervals):
                began = time.monotonic() + BEGIN
                pipe.send((interval * 1e-3, first, began))
                cpu = time.process_time()
                took = play(link, pools, address, first, began, arrivals)
                ours = Side(took, [], 0.0, time.monotonic() - began, time.process_time() - cpu)
                both = pipe.recv(), ours
                first += len(arrivals)
                if number >= 0:
                    found[interval].append(both)
        pipe.send(None)
    process.join(20)
    return [
        {
            "backend": backend,
            "load": f"{load.workload}:{load.burst}:{load.rate:g}",
            "busy": busy,
            "interval_ms": interval,
        }
        | _row(found[interval], found[intervals[0]], len(arrivals))
        for interval in intervals
    ]


def _row(sides: list[tuple[Side, Side]], base: list[tuple[Side, Side]], requests: int) -> dict[str, Any]:
    took = np.concatenate([decode.took for _, decode in sides])
    turns = np.concatenate([prefill.turns for prefill, _ in sides])
    seconds = sum(prefill.seconds for prefill, _ in sides)
    total = requests * len(sides)
    alone = statistics.mean(prefill.alone for prefill, _ in sides)
    medians, basic = ([statistics.median(decode.took) for _, decode in each] for each in (sides, base))
    return {
        "median_ms": _ms(np.median(took)),
        "p99_ms": _ms(np.quantile(took, 0.99)),
        "ratio": str(ratio(medians, basic)),
        "turns_a_second": round(len(turns) / seconds),
        "alone": round(1 / alone),
        "lost_ms": _ms((seconds - len(turns) * alone) / total),
        "turn_p99_ms": _ms(np.quantile(turns, 0.99)),
        "worst_turn_ms": _ms(turns.max()),
        "cpu_ms": _ms(sum(prefill.cpu for prefill, _ in sides) / total),
        "decode_cpu_ms": _ms(sum(decode.cpu for _, decode in sides) / total),
    }


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 2)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["tcp", "nixl"])
    parser.add_argument("--load", nargs="+", type=Load.read, default=[Load.read(each) for each in LOADS])
    parser.add_argument("--busy", nargs="+", choices=BUSY, default=list(BUSY))
    parser.add_argument("--interval", nargs="+", type=float, default=list(INTERVALS), help="in milliseconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="for which requests arrive in each round")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for busy in arguments.busy:
        for load in arguments.load:
            for backend in arguments.backend:
                for row in measure(backend, load, busy, arguments.interval, arguments.rounds, arguments.seconds):
                    show(row)
                    found.append(row)
                (arguments.out / "switching.json").write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
