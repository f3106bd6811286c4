"""Whether a library has a faster way to start a transfer than the one that its plugin uses, for pools of pages.

    python -m benchmarks.posting [--library nixl mooncake] [--rounds 15] [--out build/bench] [--json]

Pages of one pool go to random places of another, in one process. Every round times the ways one right after the
other; ``ratio`` is the median of a round's quotients with the plugin's way, and below 1 where the other is faster.

    nixl        the plugin's way is ``initialize_xfer`` over arrays of blocks. The other describes both pools once by
                ``prep_xfer_dlist``, and a request by the numbers of its pages: ``make_prepped_xfer``. It is timed both
                from the arrays to the handle alone, and to the end of the transfer.
    mooncake    the plugin's way submits all pages but one as a batch, and that one alone, which it asks for its state
                with pauses. The others are a batch that blocks, one that is submitted first and waited for afterwards,
                and a call for each page.

All rows are written to ``posting.json`` in the folder of ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .rows import show

POOL = 8192
FIRST_NAP, NAP = 20e-6, 1e-3
"""Seconds between two questions, as the core asks: twice as long each time, up to the second number."""
U64 = npt.NDArray[np.uint64]


def pool(nbytes: int) -> npt.NDArray[np.uint8]:
    """Touched memory of all pages."""
    return np.ones(POOL * nbytes, np.uint8)


def compared(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each way, and each one's ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in list(ways.items())[:: 1 if number % 2 else -1]:  # neither profits from coming last
            took = way()
            if number > 1:  # the first ones open connections
                times[name].append(took)
    first = next(iter(times.values()))
    row = {}
    for name, values in times.items():
        row[f"{name}_ms"] = round(statistics.median(values) * 1e3, 3)
        row[f"{name}_ratio"] = round(statistics.median(a / b for a, b in zip(values, first, strict=True)), 2)
    return row


def nixl(count: int, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Arrays of blocks against prepared pools."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_MODULES", "^ib")
    from nixl._api import nixl_agent, nixl_agent_config

    here, there = pool(nbytes), pool(nbytes)
    one, two = (nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("one", "two"))
    for agent, memory in ((one, here), (two, there)):
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    one.add_remote_agent(two.get_agent_metadata())
    rng = np.random.default_rng(count)
    picks = [rng.permutation(POOL)[:count] for _ in range(2)]

    def rows(memory: npt.NDArray[np.uint8], ids: npt.NDArray[np.int64]) -> U64:
        table = np.zeros((len(ids), 3), np.uint64)
        table[:, 0] = memory.ctypes.data + ids * nbytes
        table[:, 1] = nbytes
        return table

    every = np.arange(POOL)
    near = one.prep_xfer_dlist("NIXL_INIT_AGENT", rows(here, every), "DRAM")
    far = one.prep_xfer_dlist("two", rows(there, every), "DRAM")

    def arrays() -> Any:
        descriptors = [one.get_xfer_descs(rows(*side), "DRAM") for side in ((here, picks[0]), (there, picks[1]))]
        return one.initialize_xfer("WRITE", *descriptors, "two")

    def numbers() -> Any:
        return one.make_prepped_xfer("WRITE", near, picks[0].astype(np.int32), far, picks[1].astype(np.int32))

    def timed(make: Callable[[], Any], *, post: bool) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            handle = make()
            if post:
                state = one.transfer(handle)
                while state == "PROC":
                    state = one.check_xfer_state(handle)
            took = time.perf_counter() - began
            handle.release()
            return took

        return run

    made = []
    for what, post in (("handle", False), ("transfer", True)):
        ways = {"arrays": timed(arrays, post=post), "prepped": timed(numbers, post=post)}
        made.append({"library": "nixl", "what": what, "blocks": count, "bytes": nbytes, **compared(ways, rounds)})
    near.release()
    far.release()
    return made


def mooncake(count: int, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """A batch whose last page is asked for its state, against the library's other calls."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.engine import TransferEngine

    here, there = pool(nbytes), pool(nbytes)
    one, two = TransferEngine(), TransferEngine()
    for engine, memory in ((one, here), (two, there)):
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(
            memory.ctypes.data, memory.nbytes
        ):
            raise OSError("Mooncake does not start")
    session = f"127.0.0.1:{two.get_rpc_port()}"
    rng = np.random.default_rng(count)
    picks = [(rng.permutation(POOL)[:count] * nbytes + memory.ctypes.data).tolist() for memory in (here, there)]
    sizes = [nbytes] * count

    def asked() -> int:
        here, there = picks
        rest = one.batch_transfer_async_write(session, here[:-1], there[:-1], sizes[:-1])
        last = one.transfer_submit_write(session, here[-1], there[-1], sizes[-1])
        nap = FIRST_NAP
        while (state := int(one.transfer_check_status(last))) == 0:
            time.sleep(nap)
            nap = min(2 * nap, NAP)
        return int(one.get_batch_transfer_status([rest])) if state == 1 else -1

    def blocking() -> int:
        return int(one.batch_transfer_sync_write(session, *picks, sizes))

    def submitted() -> int:
        number = one.batch_transfer_async_write(session, *picks, sizes)
        return int(one.get_batch_transfer_status([number])) if number else -1

    def single() -> int:
        return sum(one.transfer_sync_write(session, *each) for each in zip(*picks, sizes, strict=True))

    def timed(move: Callable[[], int]) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            if move() != 0:
                raise OSError("Mooncake could not move a batch")
            return time.perf_counter() - began

        return run

    ways = {"asked": timed(asked), "blocking": timed(blocking), "async": timed(submitted), "single": timed(single)}
    row = compared(ways, rounds)
    return [{"library": "mooncake", "what": "transfer", "blocks": count, "bytes": nbytes, **row}]


LIBRARIES: Mapping[str, Callable[[int, int, int], list[dict[str, Any]]]] = {"nixl": nixl, "mooncake": mooncake}
SIZES: Mapping[str, Sequence[tuple[int, int]]] = {
    "nixl": ((64, 16384), (1024, 16384), (4096, 16384), (4096, 512)),
    "mooncake": ((20, 4096), (64, 16384), (1024, 16384), (1024, 512)),
}


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in arguments.library:
        for count, nbytes in SIZES[name]:
            for row in LIBRARIES[name](count, nbytes, arguments.rounds):
                show(row, arguments.json)
                found.append(row)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "posting.json").write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
