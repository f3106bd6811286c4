"""What a request costs end to end: two processes of this machine, one link each, pools as an engine keeps them.

    python -m benchmarks.handoff [--backend tcp] [--workload A B C] [--busy none prefill] [--rounds 30] [--verify]
                                 [--memory host] [--switch-interval 0.001] [--json]

Workloads, all with pages of 16 KiB for K and as much for V:

    A   4 layers x 64 random pages, with recurrent state and a metadata row
    B   32 layers x 512 random pages (512 MiB)
    C   32 layers x 512 pages in order

Each round takes all of these, one right after the other:

    request   from ``receive`` on decode to *succeeded*, with items given and prefill pushing at once
    floor     one thread of the receiving process copies the same bytes out of the sender with ``process_vm_readv``,
              1,024 vectors a call, all prepared beforehand. On a device, it copies as many pages there. It is taken
              twice; the ratio of the two is the noise
    raw       the library that the backend uses, called by itself (`statelink.backend.RawTransfers`): in the sending
              process, until the bytes have arrived. Memory is registered, and blocks are listed and merged before
    busy      a request while a thread of one process or of both runs Python, or another process does; see
              `benchmarks.busy`

Printed are medians of the ratios of one round's times, with the bounds of 95 of 100 resamples.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import state
from statelink.backend import RawLibrary, RawTransfers
from statelink.registry import load_backend
from statelink.state import Region

from .busy import BUSY, Spin, spins
from .floor import Rows, copy, merged
from .memory import HOST, Copied, address, fill, rows, zeros
from .pairs import in_turn, ratio
from .rows import show

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TOKENS, HEADS, DIM = 16, 8, 128


class Workload(NamedTuple):
    """How much of what, and in which order."""

    layers: int
    pages: int
    random: bool
    states: bool


WORKLOADS = {
    "A": Workload(4, 64, True, True),
    "B": Workload(32, 512, True, False),
    "C": Workload(32, 512, False, False),
}


class Pools:
    """The pools of one side."""

    def __init__(self, workload: Workload, name: str, memory: str) -> None:
        count = workload.pages + workload.pages // 8
        shape = (count, TOKENS, HEADS, DIM // 2)
        self.kv = {n: (zeros(shape, "int16", memory), zeros(shape, "int16", memory)) for n in range(workload.layers)}
        self.arrays = [array for pair in self.kv.values() for array in pair]
        parts = [state.kv_pages(self.kv, heads=HEADS)]
        if workload.states:
            self.conv = {n: zeros((8, 4096, 6), "uint8", memory) for n in range(4)}
            self.ssm = {n: zeros((8, 16, 64, 32), "float32", memory) for n in range(4)}
            self.row = np.zeros((8, 64), np.uint8)
            parts += [state.mamba_slots(conv=self.conv, ssm=self.ssm, heads=16), state.aux_rows({"row": self.row})]
        self.inventory = state.describe(name, parts)
        rng = np.random.default_rng(len(name))
        self.ids = rng.permutation(count)[: workload.pages] if workload.random else np.arange(workload.pages)
        self.items: dict[str, Any] = {"kv": self.ids}
        if workload.states:
            self.items |= {"mamba": [3], "aux": [5]}

    def blocks(self) -> Rows:
        """Address and length of every page, in the order of the layers."""
        return np.concatenate([rows(array, self.ids) for array in self.arrays])

    def memory(self) -> Rows:
        """Address and length of every pool of pages."""
        return np.array([[address(array), array.nbytes] for array in self.arrays], np.uint64)


class Sender:
    """The sending process. Its methods are called from the other one."""

    def __init__(self, name: str, config: dict[str, Any], spin: str, memory: str) -> None:
        workload = WORKLOADS[name]
        self.pools = Pools(workload, "prefill", memory)
        for array in self.pools.arrays:
            fill(array)
        self.tokens = workload.pages * TOKENS
        self.spin, self.room = Spin(spin), 0
        self.link = statelink.open({"role": "prefill", **config}, self.pools.inventory)

    def where(self) -> tuple[str, int, Rows]:
        """The link's address, this process, and the blocks that it sends."""
        return self.link.address, os.getpid(), self.pools.blocks()

    def send(self, busy: bool) -> None:
        """One request."""
        self.room += 1
        self.spin.set(busy)
        sending = self.link.send(self.room, self.tokens)
        sending.push(self.pools.items)
        sending.wait(60)
        sending.check()
        self.spin.set(False)


@contextlib.contextmanager
def engine(backend: str, name: str, memory: Rows, where: str) -> Iterator[RawLibrary | None]:
    """The library behind a backend, for ranges of memory here or on a device; ``None`` if the backend gives none."""
    kind = load_backend(backend)
    if not issubclass(kind, RawTransfers):
        yield None
        return
    regions = [Region(address, nbytes, "dram" if where == HOST else where) for address, nbytes in memory.tolist()]
    made = kind.raw(name, kind.Options(), "127.0.0.1", regions)
    try:
        yield made
    finally:
        made.close()


def prefill(name: str, config: dict[str, Any], spin: str, memory: str, pipe: Connection) -> None:
    """Runs in the sending process until the other one has no more to do."""
    sender = Sender(name, config, spin, memory)
    with sender.link, sender.spin, engine(config["backend"], "source", sender.pools.memory(), memory) as raw:
        pipe.send(sender.where())
        while (asked := pipe.recv())[0] != "end":
            what, *arguments = asked
            if what == "send":
                sender.send(*arguments)
            elif raw is not None and what == "know":
                raw.connect(*arguments)
            elif raw is not None and what == "raw":
                pipe.send(raw.move())


def measure(name: str, config: dict[str, Any], rounds: int, busy: str = "none", memory: str = HOST) -> dict[str, Any]:
    """One workload over one backend."""
    workload = WORKLOADS[name]
    ours, theirs = spins(busy)[::-1]
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=prefill, args=(name, config, theirs, memory, other), daemon=True)
    process.start()
    other.close()  # so that a process that dies ends this one, too
    pools, backend = Pools(workload, "decode", memory), config["backend"]
    moved: dict[str, Any] = {}
    rooms = iter(range(1, 1 << 20))
    with (
        statelink.open({"role": "decode", **config}, pools.inventory) as link,
        Spin(ours) as spin,
        engine(backend, "target", pools.memory(), memory) as raw,
    ):
        address, pid, source = pipe.recv()
        target = pools.blocks()

        def request(busy: bool = False) -> float:
            spin.set(busy)
            pipe.send(("send", busy))
            began = time.perf_counter()
            receiving = link.receive(next(rooms), address, workload.pages * TOKENS, pools.items)
            receiving.wait(60)
            took = time.perf_counter() - began
            receiving.check()
            spin.set(False)
            moved.update(receiving.report.moved)
            return took

        least = partial(copy, pid, source, target) if memory == HOST else Copied(pools.arrays, pools.ids)

        def floor() -> float:
            began = time.perf_counter()
            least()
            return time.perf_counter() - began

        def library() -> float:
            pipe.send(("raw",))
            return float(pipe.recv())

        ways = {"request": request, "floor": floor, "again": floor}
        if raw is not None:
            pipe.send(("know", raw.address(), *merged(source, target)))
            ways["raw"] = library
        if busy != "none":
            ways["busy"] = lambda: request(True)
        took = list(in_turn(ways, rounds))
        times = {way: [each[way] for each in took] for way in ways}
        pipe.send(("end",))
    process.join(20)
    row: dict[str, Any] = {
        "workload": name,
        **config,
        "memory": memory,
        "MiB": round(sum(each.nbytes for each in moved.values()) / 2**20, 1),
        "blocks": sum(each.blocks for each in moved.values()),
        **{f"{way}_ms": round(statistics.median(values) * 1e3, 2) for way, values in times.items() if way != "again"},
        "over_floor": ratio(times["request"], times["floor"]),
        "noise": ratio(times["again"], times["floor"]),
    }
    if raw is not None:
        row["over_raw"] = ratio(times["request"], times["raw"])
    if busy != "none":
        row |= {"busy": busy, "busy_over_quiet": ratio(times["busy"], times["request"])}
    return row


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["tcp"])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--busy", nargs="+", choices=BUSY, default=["none"])
    parser.add_argument("--memory", default=HOST, help="host, or a device as torch names it, such as cuda:0")
    parser.add_argument("--switch-interval", type=float, help="of the links, in seconds")
    parser.add_argument("--verify", action="store_true", help="also with verify = 'digest'")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.workload:
        for backend in arguments.backend:
            for verify in ("off", "digest") if arguments.verify else ("off",):
                for busy in arguments.busy:
                    config = {"backend": backend, "verify": verify, "switch_interval": arguments.switch_interval}
                    row = measure(name, config, arguments.rounds, busy, arguments.memory)
                    show(row, arguments.json)


if __name__ == "__main__":
    main()
