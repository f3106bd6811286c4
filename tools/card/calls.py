"""How long the control thread of prefill is away, and what keeps it: many requests at once, of the card's memory.

    python -m tools.card.calls [--rooms 64] [--rounds 5] [--large-mib 512]

A thread aborts empty rooms, one after the other, and waits for each: the control thread has to answer, so the longest
answer is the longest gap. Each call of the backend is timed, and counted by its thread. So is each collection of
Python's garbage collector, which stops every thread that runs Python: torch alone has 200,000 objects, which take about
0.1 s. The small requests run once more after `gc.freeze`, which engines call, and which leaves these objects alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import statelink
from statelink import state
from statelink_nixl import NixlBackend

from .device import Card
from .link import MIB, PAGES, Pools
from .pair import PAGE_TOKENS, both, succeeded
from .say import answer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SMALL_PAGES = 6
"""Pages of a small request: 0.75 MiB in each layer, of 64 KiB for keys and as much for values."""
FROZEN = "small requests at once, after gc.freeze"
PHASES = (("small requests at once", 0, SMALL_PAGES), (FROZEN, 0, SMALL_PAGES), ("large request", 1, PAGES))
"""Name, number of requests at once (0 for the argument's), and pages of each."""
FIRST = 1 << 32
"""The first id of the empty rooms."""


class Timed:
    """The longest call of each method of the backend and the longest collections, by their threads; milliseconds."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self._lock = threading.Lock()
        for name in ("register", "connect", "submit", "poll"):
            setattr(NixlBackend, name, self._timed(name, getattr(NixlBackend, name)))
        self._collects = 0.0
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, about: dict[str, int]) -> None:
        # No other thread runs Python between the two calls. This takes no lock, because its thread may hold one.
        if phase == "start":
            self._collects = time.perf_counter()
            return
        key = f"collection of generation {about['generation']} on {_thread()}"
        took = (time.perf_counter() - self._collects) * 1e3
        self.longest[key] = max(self.longest.get(key, 0.0), took)

    def _timed(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                took, key = (time.perf_counter() - began) * 1e3, f"{name} on {_thread()}"
                with self._lock:
                    self.longest[key] = max(self.longest.get(key, 0.0), took)

        return timed


def _thread() -> str:
    return re.sub(r"[-_]\d+$", "", threading.current_thread().name)


class Asking:
    """Asks the control thread, without a pause, and keeps the longest and the median time of an answer."""

    def __init__(self, link: statelink.Link) -> None:
        self._link, self._ended = link, threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join(10)

    def _ask(self) -> None:
        room = FIRST
        while not self._ended.is_set():
            room += 1
            began = time.perf_counter()
            empty = self._link.send(room, PAGE_TOKENS)
            empty.abort("only asking")
            empty.wait(10, quiesced=True)
            self.times.append((time.perf_counter() - began) * 1e3)


def side(role: str, pipe: Connection, job: dict[str, Any]) -> dict[str, Any]:
    """One side. Prefill returns what it timed."""
    timed = Timed()
    card = Card()
    large = job["large"]
    pools = Pools(card, {"nbytes": large, "page": 64 << 10})
    found: dict[str, Any] = {"longest": timed.longest}
    with statelink.open({"role": role, "backend": "nixl"}, state.describe(role, pools.parts, model="calls")) as link:
        pipe.send(link.address)
        address, room = pipe.recv(), 0

        def requests(count: int, pages: int) -> None:
            nonlocal room
            open_rooms: list[Any] = []
            items = {"kv": np.arange(pages)}
            for _ in range(count):
                room += 1
                if role == "decode":
                    open_rooms.append(link.receive(room, address, pages * PAGE_TOKENS, items))
                else:
                    open_rooms.append(link.send(room, pages * PAGE_TOKENS))
                    open_rooms[-1].push(items)
            for each in open_rooms:
                succeeded(each)

        def together() -> None:
            pipe.send("go on")
            pipe.recv()

        requests(1, 1)  # connects
        for name, count, pages in PHASES:
            count = count or job["rooms"]
            if name == FROZEN:
                gc.collect()
                gc.freeze()
            timed.longest.clear()
            together()
            if role == "decode":
                for _ in range(job["rounds"]):
                    requests(count, pages)
                together()
                continue
            with Asking(link) as asking:
                for _ in range(job["rounds"]):
                    requests(count, pages)
                together()
            found[name] = {"gap": max(asking.times), "median": float(np.median(asking.times)), **dict(timed.longest)}
        pipe.send("end")
        pipe.recv()
    return found


def main() -> int:
    """Run it, and say what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large-mib", type=int, default=512)
    arguments = parser.parse_args()
    job = {"rooms": arguments.rooms, "rounds": arguments.rounds, "large": arguments.large_mib * MIB}
    found = both(side, job, 50)["prefill"]
    for name, count, _ in PHASES:
        times, what = dict(found[name]), f"{count or arguments.rooms} {name}"
        answer(f"{what}: longest gap of prefill's control thread", round(times.pop("gap"), 2), "ms")
        answer(f"{what}: median answer of it", round(times.pop("median"), 3), "ms")
        for key, value in sorted(times.items()):
            answer(f"{what}: longest {key}", round(value, 2), "ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
