"""What a small request costs beside the bytes: workload E, alone and with many in flight, also beside a busy engine.

    python -m benchmarks.rooms [--backend tcp nixl] [--in-flight 1 64] [--rooms 3000] [--switch-interval 0.001]
                               [--busy none process prefill decode both scheduler] [--json]

A room of workload E has the pages of one sliding window, one recurrent slot and one row of metadata. Two processes play
it as engines do: each opens as many rooms as it may, and takes the changes of its link. A busy process has one more
thread, which runs pure Python all the time (see `benchmarks.busy`).

Printed per run: rooms a second; the median time from ``receive`` to *succeeded* on decode; CPU time of each process per
room, without the busy thread's; and how many of its iterations the busy thread keeps beside the rooms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import state

from .busy import BUSY, Spin, spins
from .rows import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

TOKENS, PAGE, WINDOW = 64, 16, 32
WARM = 200


class Pools:
    """The pools of one side, with space for so many rooms at once."""

    def __init__(self, name: str, rooms: int, dim: int = 64) -> None:
        per = WINDOW // PAGE
        shape = (per * rooms, PAGE, 4, dim)
        self.window = {n: (np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)) for n in range(2)}
        self.conv = {2: np.zeros((rooms, 8 * dim, 4), np.uint16)}
        self.ssm = {2: np.zeros((rooms, 8, dim // 4, 16), np.float32)}
        self.row = np.zeros((rooms, 64), np.uint8)
        self.inventory = state.describe(
            name,
            [
                state.kv_pages(self.window, heads=4, window=WINDOW),
                state.mamba_slots(conv=self.conv, ssm=self.ssm, heads=8),
                state.aux_rows({"row": self.row}),
            ],
        )
        self.items = [{"swa": list(range(per * n, per * n + per)), "mamba": [n], "aux": [n]} for n in range(rooms)]


class Side(NamedTuple):
    """What one process measured."""

    seconds: float
    cpu: float
    latency: float
    iterations: float


def play(link: statelink.Link, pools: Pools, peer: str, first: int, rooms: int, in_flight: int) -> list[float]:
    """Open so many rooms, at most ``in_flight`` at once; the time that each of them took."""
    free, live, took = list(range(in_flight)), dict[int, tuple[statelink.Room, int, float]](), list[float]()
    following = first
    while len(took) < rooms:
        while free and following < first + rooms:
            number = free.pop()
            began = time.perf_counter()
            if peer:
                room: statelink.Room = link.receive(following, peer, TOKENS, pools.items[number])
            else:
                room = link.send(following, TOKENS)
                room.push(pools.items[number])
            live[following] = room, number, began
            following += 1
        for room in link.changes(1.0):
            held = live.get(room.room)
            if held is None or held[0] is not room or not room.quiesced:
                continue
            if room.status is statelink.Status.SUCCEEDED:
                took.append(time.perf_counter() - held[2])
            elif room.status is statelink.Status.FAILED:
                raise RuntimeError(str(room.reason))
            else:
                continue
            del live[room.room]
            free.append(held[1])
    return took


def measured(
    link: statelink.Link, pools: Pools, peer: str, first: int, rooms: int, in_flight: int, spin: str, pipe: Connection
) -> Side:
    """One run of one side, beside what keeps it busy. It begins once the other side is ready, too."""
    with Spin(spin) as busy:
        quiet = busy.rate() if spin != "none" else 0.0
        pipe.send("ready")
        pipe.recv()
        spent, cpu, count, began = busy.cpu, time.process_time(), busy.count, time.perf_counter()
        took = play(link, pools, peer, first, rooms, in_flight)
        seconds = time.perf_counter() - began
        own = time.process_time() - cpu - (busy.cpu - spent)
        kept = (busy.count - count) / seconds / quiet if quiet else 0.0
    return Side(seconds, own / rooms, statistics.median(took), kept)


def runs(rooms: int, in_flight: int) -> Iterator[tuple[int, int]]:
    """First room and number of rooms: to warm up, and to measure."""
    yield 1, max(WARM, 2 * in_flight)
    yield 1_000_000, rooms


def prefill(
    config: dict[str, Any],
    rooms: int,
    in_flight: int,
    spin: str,
    without: Callable[[], None] | None,
    pipe: Connection,
) -> None:
    """The sending process."""
    if without is not None:
        without()
    pools = Pools("prefill", in_flight)
    with statelink.open({"role": "prefill", **config}, pools.inventory) as link:
        pipe.send(link.address)
        for first, count in runs(rooms, in_flight):
            pipe.send(measured(link, pools, "", first, count, in_flight, spin if first > 1 else "none", pipe))
        pipe.recv()


def measure(
    backend: str,
    rooms: int,
    in_flight: int,
    busy: str,
    without: Callable[[], None] | None = None,
    switch_interval: float | None = None,
) -> dict[str, Any]:
    """One run over one backend. ``without``: called first in the sending process; see `benchmarks.fast_paths`."""
    config = {"backend": backend, "deadline": 60.0, "switch_interval": switch_interval}
    theirs_spin, ours_spin = spins(busy)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    given = (config, rooms, in_flight, theirs_spin, without, theirs)
    process = context.Process(target=prefill, args=given, daemon=True)
    process.start()
    pools = Pools("decode", in_flight)
    with statelink.open({"role": "decode", **config}, pools.inventory) as link:
        address = pipe.recv()
        for first, count in runs(rooms, in_flight):
            ours = measured(link, pools, address, first, count, in_flight, ours_spin if first > 1 else "none", pipe)
            theirs_measured = pipe.recv()
        pipe.send("done")
    process.join(20)
    row = {
        "backend": backend,
        "in_flight": in_flight,
        "busy": busy,
        "switch_interval": switch_interval,
        "rooms_per_s": round(rooms / max(ours.seconds, theirs_measured.seconds)),
        "median_ms": round(ours.latency * 1e3, 3),
        "prefill_cpu_ms": round(theirs_measured.cpu * 1e3, 3),
        "decode_cpu_ms": round(ours.cpu * 1e3, 3),
    }
    kept = [side.iterations for side in (theirs_measured, ours) if side.iterations]
    return row | ({"engine_keeps": round(min(kept), 2)} if kept else {})


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["tcp"])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--busy", nargs="+", choices=BUSY, default=["none"])
    parser.add_argument("--rooms", type=int, default=3000)
    parser.add_argument("--switch-interval", type=float, help="of the links, in seconds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for backend in arguments.backend:
        for busy in arguments.busy:
            for in_flight in arguments.in_flight:
                rooms = arguments.rooms if in_flight > 1 else max(arguments.rooms // 10, 50)
                interval = arguments.switch_interval
                row = measure(backend, rooms, in_flight, busy, switch_interval=interval)
                show(row, arguments.json)


if __name__ == "__main__":
    main()
