"""Staged against direct where plans shatter: two prefill ranks with half of the heads each, one decode rank, pages NHD.

A block is one token's heads of one rank: direct moves each by itself. Both ways are measured round by round in one run,
over the same pools, so that only their ratio says something on a machine that is shared::

    python -m benchmarks.staged --backend tcp nixl mooncake
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import statelink
from statelink import state

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TOKENS, LAYERS, HEADS, PAGES = 16, 8, 8, 64
WAYS = ("direct", "staged")


def inventory(name: str, dim: int, tp: tuple[int, int]) -> tuple[state.Inventory, dict[int, Any]]:
    """A rank's pages, and their arrays."""
    rng = np.random.default_rng(tp[0])
    shape = (PAGES, TOKENS, HEADS // tp[1], dim)
    arrays = {
        n: tuple(rng.integers(0, 255, shape, np.uint8).astype(np.uint16) for _ in range(2)) for n in range(LAYERS)
    }
    return state.describe(
        name,
        [state.kv_pages({n: (pair[0], pair[1]) for n, pair in arrays.items()}, heads=HEADS, tp=tp)],
        rank=tp[0],
        ranks=tp[1],
    ), arrays


def config(role: str, backend: str, way: str, ring: int) -> dict[str, Any]:
    """Of a link of one of the two ways."""
    staging = {"mode": "always", "ring_bytes": ring} if way == "staged" else None
    return {"role": role, "backend": backend, "staging": staging}


def prefill(backend: str, dim: int, ring: int, pipe: Connection) -> None:
    """The sending process: two ranks, each with a link for either way."""
    held = [inventory("prefill", dim, (rank, 2)) for rank in range(2)]
    with contextlib.ExitStack() as stack:
        links = {
            way: [
                stack.enter_context(statelink.open(config("prefill", backend, way, ring), known)) for known, _ in held
            ]
            for way in WAYS
        }
        pipe.send({way: [link.address for link in each] for way, each in links.items()})
        pipe.send([arrays for _, arrays in held])
        for room in itertools.count(1):
            way = pipe.recv()
            if not way:
                break
            rooms = [link.send(room, PAGES * TOKENS) for link in links[way]]
            for each in rooms:
                each.push({"kv": np.arange(PAGES)[::-1]})
            for each in rooms:
                each.wait(120)
                each.check()


def measure(backend: str, dim: int, rounds: int, ring: int) -> dict[str, Any]:
    """One size of block over one backend."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(backend, dim, ring, theirs), daemon=True)
    process.start()
    ours, arrays = inventory("decode", dim, (0, 1))
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    blocks: dict[str, int] = {}
    order = np.random.default_rng(1).permutation(PAGES)
    with contextlib.ExitStack() as stack:
        links = {way: stack.enter_context(statelink.open(config("decode", backend, way, ring), ours)) for way in WAYS}
        addresses, sources = pipe.recv(), pipe.recv()
        numbers = itertools.count(1)
        for turn in range(rounds + 2):
            for way in WAYS if turn % 2 else reversed(WAYS):
                for pair in arrays.values():
                    for array in pair:
                        array[:] = 0
                pipe.send(way)
                began = time.perf_counter()
                room = links[way].receive(next(numbers), addresses[way], PAGES * TOKENS, {"kv": order})
                room.wait(120)
                if turn > 1:  # the first ones touch fresh pages and open connections
                    took[way].append(time.perf_counter() - began)
                room.check()
                blocks[way] = room.report.moved["kv"].blocks
                for layer, pair in arrays.items():
                    for number, array in enumerate(pair):
                        wanted = np.concatenate([source[layer][number] for source in sources], axis=2)[::-1]
                        np.testing.assert_array_equal(array[order], wanted)
        pipe.send("")
    process.join(30)
    ratios = [direct / staged for direct, staged in zip(took["direct"], took["staged"], strict=True)]
    return {
        "backend": backend,
        "block_bytes": HEADS // 2 * dim * 2,
        "MiB": PAGES * TOKENS * HEADS * dim * 2 * 2 * LAYERS / 2**20,
        "blocks": blocks["direct"],
        "parcels": blocks["staged"],
        **{f"{way}_ms": round(statistics.median(took[way]) * 1e3, 2) for way in WAYS},
        "times_faster": round(statistics.median(ratios), 2),
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["tcp"])
    parser.add_argument("--dim", type=int, nargs="+", default=[32, 128, 512], help="elements of a head")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ring", type=int, default=64, help="MiB of a ring")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for dim, backend in itertools.product(arguments.dim, arguments.backend):
        row = measure(backend, dim, arguments.rounds, arguments.ring << 20)
        text = json.dumps(row) if arguments.json else "  ".join(f"{key} {value}" for key, value in row.items())
        print(text, flush=True)


if __name__ == "__main__":
    main()
