"""What small requests and large ones cost one another: both between the same processes, or from several into one.

`python -m benchmarks --suite mixed` measures it. A small request has 1 MiB, a large one so many MiB, and so many large
ones are always under way. With several senders, the first one sends the small requests and its share of the large ones.

Each round measures three times in turn: small requests alone, one after the other; large ones alone; and small ones
beside large ones. Printed per run, over all rounds: the median and the 99th percentile of a small request, alone and
beside, and their quotients; the bytes of all requests together beside, in a second, as a share of those of large ones
alone; and the share of large requests in these bytes.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import state

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PAGE, HEADS, DIM, LAYERS = 16, 8, 64, 32
"""A page of all layers is 1 MiB."""
MIB = 1 << 20
PAUSE = 0.01
"""Seconds between two small requests."""
SENDERS = 1, 4
SMALL_ALONE = 40
"""Small requests alone in a round."""
SECONDS = 2.0
"""How long the other parts of a round take."""


class Kind(NamedTuple):
    """Large requests: how many are under way at once, and their pages."""

    number: int
    pages: int


KINDS = Kind(2, 512), Kind(8, 64)


def pools(name: str, pages: int) -> statelink.state.Inventory:
    """Pools of so many pages, and their description."""
    shape = (pages, PAGE, HEADS, DIM)
    kv = {layer: (np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)) for layer in range(LAYERS)}
    kept.append(kv)
    return state.describe(name, [state.kv_pages(kv, heads=HEADS)])


kept: list[Any] = []
"""The memory of the pools, which links do not keep."""


def slots(kind: Kind) -> list[list[int]]:
    """The pages of each large request and of the small one, which comes last. Engines' pages are seldom in order."""
    rng = np.random.default_rng(1)
    large = [(kind.pages * slot + rng.permutation(kind.pages)).tolist() for slot in range(kind.number)]
    return [*large, [kind.pages * kind.number]]


def send(config: dict[str, Any], kind: Kind, number: int, pipe: Connection) -> None:
    """A sending process: sends the request of each slot that it is told."""
    items = slots(kind)
    with statelink.open({"role": "prefill", **config}, pools(f"prefill{number}", 1 + kind.number * kind.pages)) as link:
        pipe.send(link.address)
        while (told := pipe.recv()) is not None:
            room, slot = told
            link.send(room, PAGE * len(items[slot])).push({"kv": items[slot]})


class Decode:
    """The receiving side.

    Args:
        link: Its link.
        kind: The large requests.
        pipes: To the sending processes.
    """

    def __init__(self, link: statelink.Link, kind: Kind, pipes: Sequence[Connection]) -> None:
        self._link = link
        self._kind = kind
        self._pipes = pipes
        self._addresses = [pipe.recv() for pipe in pipes]
        self._items = slots(kind)
        self._lock = threading.Lock()
        self._room = 0

    def receive(self, slot: int, sender: int) -> float:
        """Receive one request. Blocks; returns its seconds."""
        items = self._items[slot]
        with self._lock:
            self._room += 1
            room = self._room
            self._pipes[sender].send((room, slot))
        began = time.perf_counter()
        receiving = self._link.receive(room, self._addresses[sender], PAGE * len(items), {"kv": items}, deadline=120)
        receiving.wait()
        receiving.check()
        return time.perf_counter() - began

    def small(self, seconds: float = 0.0, count: int = 0) -> list[float]:
        """Receive small requests, one after the other, for so long, or so many."""
        took: list[float] = []
        until = time.perf_counter() + seconds
        while len(took) < count or time.perf_counter() < until:
            took.append(self.receive(-1, 0))
            time.sleep(PAUSE)
        return took

    def large(self, seconds: float) -> LargeOnes:
        """Receive large requests for so long, on threads."""
        return LargeOnes(self, self._kind, len(self._pipes), seconds)


class LargeOnes:
    """Keeps large requests under way for a while, as a context manager; at its end, all have ended.

    Attributes:
        nbytes: Bytes of those that have ended.
        seconds: From the first one to the end of the last one.
    """

    def __init__(self, decode: Decode, kind: Kind, senders: int, seconds: float) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._until = self._began + seconds
        self._threads = [
            threading.Thread(target=self._run, args=(decode, kind, slot, slot % senders)) for slot in range(kind.number)
        ]

    def _run(self, decode: Decode, kind: Kind, slot: int, sender: int) -> None:
        while time.perf_counter() < self._until:
            decode.receive(slot, sender)
            self.nbytes += kind.pages * MIB
        self.seconds = time.perf_counter() - self._began

    def __enter__(self) -> LargeOnes:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()


def quantile(values: Sequence[float], which: float) -> float:
    """In milliseconds."""
    return round(float(np.quantile(values, which)) * 1e3, 2)


def measure(backend: str, kind: Kind, senders: int, rounds: int) -> dict[str, Any]:
    """One run over one backend."""
    config = {"backend": backend}
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for number in range(senders):
        pipe, theirs = context.Pipe()
        process = context.Process(target=send, args=(config, kind, number, theirs), daemon=True)
        process.start()
        pipes.append(pipe)
        processes.append(process)
    alone: list[float] = []
    beside: list[float] = []
    rates: list[tuple[float, float]] = []
    shares: list[float] = []
    with statelink.open({"role": "decode", **config}, pools("decode", 1 + kind.number * kind.pages)) as link:
        decode = Decode(link, kind, pipes)
        decode.small(count=20)
        with decode.large(SECONDS / 2):
            pass
        for _ in range(rounds):
            alone += decode.small(count=SMALL_ALONE)
            with decode.large(SECONDS) as large:
                pass
            rate = large.nbytes / large.seconds
            with decode.large(SECONDS) as large:
                small = decode.small(SECONDS - 0.1)
            beside += small
            together = large.nbytes + len(small) * MIB
            rates.append((rate, together / large.seconds))
            shares.append(large.nbytes / together)
        for pipe in pipes:
            pipe.send(None)
    for process in processes:
        process.join(20)
    medians, tails = ([quantile(each, which) for each in (alone, beside)] for which in (0.5, 0.99))
    return {
        "backend": backend,
        "large": f"{kind.number}x{kind.pages}",
        "senders": senders,
        "alone_ms": medians[0],
        "beside_ms": medians[1],
        "alone_p99_ms": tails[0],
        "beside_p99_ms": tails[1],
        "median_ratio": round(medians[1] / medians[0], 2),
        "p99_ratio": round(tails[1] / tails[0], 2),
        "large_mib_per_s": round(float(np.median([rate for rate, _ in rates])) / MIB),
        "bytes_ratio": round(float(np.median([together / rate for rate, together in rates])), 3),
        "large_share": round(float(np.median(shares)), 3),
    }
