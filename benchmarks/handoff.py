"""What a request costs end to end: two processes of this machine, one link each, pools as an engine keeps them.

    python -m benchmarks.handoff [--backend tcp] [--workload A B C] [--busy none prefill] [--rounds 10] [--verify]
                                 [--json]

Workloads, all with pages of 16 KiB for K and as much for V:

    A   4 layers x 64 random pages, with recurrent state and a metadata row
    B   32 layers x 512 random pages (512 MiB)
    C   32 layers x 512 pages in order

Each round runs the floor and a request, one right after the other. The floor is one thread of the receiving process
that copies the same bytes out of the sender with ``process_vm_readv``, 1,024 vectors a call, all prepared beforehand.
The request is timed on decode, from ``receive`` to *succeeded*, with items given and prefill pushing at once. Only the
ratio of the two means anything on a shared machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import statelink
from statelink import state

from .busy import BUSY, Spin, spins

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TOKENS, HEADS, DIM = 16, 8, 128
IOV_MAX = 1024

libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv.restype = ctypes.c_ssize_t
libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


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


def beside(busy: str) -> contextlib.AbstractContextManager[object]:
    """A busy thread of this process, if there is to be one."""
    return contextlib.nullcontext() if busy == "none" else Spin(busy)


class Pools:
    """The pools of one side."""

    def __init__(self, workload: Workload, name: str) -> None:
        count = workload.pages + workload.pages // 8
        shape = (count, TOKENS, HEADS, DIM // 2)
        self.kv = {n: (np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)) for n in range(workload.layers)}
        parts = [state.kv_pages(self.kv, heads=HEADS)]
        if workload.states:
            self.conv = {n: np.zeros((8, 4096, 6), np.uint8) for n in range(4)}
            self.ssm = {n: np.zeros((8, 16, 64, 32), np.float32) for n in range(4)}
            self.row = np.zeros((8, 64), np.uint8)
            parts += [state.mamba_slots(conv=self.conv, ssm=self.ssm, heads=16), state.aux_rows({"row": self.row})]
        self.inventory = state.describe(name, parts)
        rng = np.random.default_rng(len(name))
        self.ids = rng.permutation(count)[: workload.pages] if workload.random else np.arange(workload.pages)
        self.items: dict[str, Any] = {"kv": self.ids}
        if workload.states:
            self.items |= {"mamba": [3], "aux": [5]}

    def blocks(self) -> npt.NDArray[np.uint64]:
        """Address and length of every page, in the order of the layers: an iovec array."""
        rows = [
            np.stack(
                [array.ctypes.data + self.ids * array.strides[0], np.full(len(self.ids), array.strides[0])], axis=1
            )
            for pair in self.kv.values()
            for array in pair
        ]
        return np.concatenate(rows).astype(np.uint64)


def prefill(name: str, config: dict[str, Any], rounds: int, busy: str, pipe: Connection) -> None:
    """The sending process."""
    workload = WORKLOADS[name]
    pools = Pools(workload, "prefill")
    for pair in pools.kv.values():
        for array in pair:
            array[:] = np.arange(array.size, dtype=np.uint16).reshape(array.shape)
    tokens = workload.pages * TOKENS
    with beside(busy), statelink.open({"role": "prefill", **config}, pools.inventory) as link:
        pipe.send((link.address, os.getpid(), pools.blocks()))
        for room in range(1, rounds + 1):
            pipe.recv()
            sending = link.send(room, tokens)
            sending.push(pools.items)
            sending.wait(60)
            sending.check()
        pipe.recv()


def copy(pid: int, source: npt.NDArray[np.uint64], target: npt.NDArray[np.uint64]) -> None:
    """The floor: read every block out of the other process."""
    for first in range(0, len(source), IOV_MAX):
        theirs, ours = source[first : first + IOV_MAX], target[first : first + IOV_MAX]
        wanted = int(ours[:, 1].sum())
        done = libc.process_vm_readv(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
        if done != wanted:
            raise OSError(ctypes.get_errno(), f"process_vm_readv moved {done} of {wanted} bytes")


def measure(name: str, config: dict[str, Any], rounds: int, busy: str) -> dict[str, Any]:
    """One workload over one backend."""
    workload = WORKLOADS[name]
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(name, config, rounds, spins(busy)[0], theirs), daemon=True)
    process.start()
    pools = Pools(workload, "decode")
    tokens = workload.pages * TOKENS
    ratios, floors, requests = [], [], []
    with beside(spins(busy)[1]), statelink.open({"role": "decode", **config}, pools.inventory) as link:
        address, pid, source = pipe.recv()
        target = pools.blocks()
        for room in range(1, rounds + 1):
            began = time.perf_counter()
            copy(pid, source, target)
            floor = time.perf_counter() - began
            pipe.send("go")
            began = time.perf_counter()
            receiving = link.receive(room, address, tokens, pools.items)
            receiving.wait(60)
            took = time.perf_counter() - began
            receiving.check()
            if room > 2:  # the first ones touch fresh pages and open connections
                ratios.append(took / floor)
                floors.append(floor * 1e3)
                requests.append(took * 1e3)
        moved = receiving.report.moved
        pipe.send("done")
    process.join(20)
    return {
        "workload": name,
        **config,
        "busy": busy,
        "MiB": round(sum(each.nbytes for each in moved.values()) / 2**20, 1),
        "blocks": sum(each.blocks for each in moved.values()),
        "floor_ms": round(statistics.median(floors), 2),
        "request_ms": round(statistics.median(requests), 2),
        "ratio": round(statistics.median(ratios), 2),
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["tcp"])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--busy", nargs="+", choices=BUSY, default=["none"])
    parser.add_argument("--verify", action="store_true", help="also with verify = 'digest'")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.workload:
        for backend in arguments.backend:
            for verify in ("off", "digest") if arguments.verify else ("off",):
                for busy in arguments.busy:
                    row = measure(name, {"backend": backend, "verify": verify}, max(arguments.rounds, 4), busy)
                    text = "  ".join(f"{key} {value}" for key, value in row.items())
                    print(json.dumps(row) if arguments.json else text, flush=True)


if __name__ == "__main__":
    main()
