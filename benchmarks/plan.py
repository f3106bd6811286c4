"""What planning costs: matching instances, compiling for a peer, and turning a request's indices into blocks.

    python -m benchmarks.plan [--rounds 30] [--json]

Cases are 32 and 96 layers (K and V), pages of 64 KiB, 512 to 16,384 items: contiguous, half-scattered (runs of 2) and
random, at equal TP; and TP 8 to 4 in NHD, where a page falls apart into one run per token. ``bytes`` are those of all
blocks together. If they are not those of the request, there is no row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from statelink import plan, state

from .rows import show

I64 = npt.NDArray[np.int64]
TOKENS, HEADS, DIM = 16, 16, 128
BASE = 1 << 40


def rank(name: str, layers: int, pages: int, tp: tuple[int, int], *, mixed: bool, envelope: bool) -> state.Inventory:
    """One rank's inventory over made-up addresses."""
    local = max(1, HEADS // tp[1])  # where there are more ranks than heads, several have the same
    item = TOKENS * local * DIM * 2
    kv = {}
    stride = item * 2 * layers if envelope else item
    region = state.Region(BASE, stride * pages) if envelope else None
    for layer in range(layers):
        pair = []
        for part in range(2):
            dim = DIM + 8 * (layer % 7) if mixed else DIM
            number = 2 * layer + part
            address = BASE + number * item if envelope else BASE + number * item * pages * 2
            shape = (pages, TOKENS, local, dim)
            inner = (local * dim * 2, dim * 2, 2)
            outer = stride if envelope else TOKENS * inner[0]
            memory = state.Memory.pointer(address, shape, "bfloat16", 2, strides=(outer, *inner), region=region)
            pair.append(memory)
        kv[layer] = (pair[0], pair[1])
    return state.describe(name, [state.kv_pages(kv, heads=HEADS, tp=tp)], rank=tp[0], ranks=tp[1])


def best(action: Callable[[], object], rounds: int) -> float:
    """Median seconds of one call."""
    action()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def indices(kind: str, count: int, pool: int, rng: np.random.Generator) -> I64:
    """Page ids of a request."""
    if kind == "contiguous":
        return np.arange(count, dtype=np.int64)
    if kind == "random":
        return rng.permutation(pool)[:count].astype(np.int64)
    starts = rng.permutation(pool // 2)[: count // 2] * 2
    return np.stack([starts, starts + 1], axis=1).ravel().astype(np.int64)


def blocks_of(move: plan.Move) -> int:
    """Use up every batch of a move."""
    return sum(batch.count for batch in move.blocks())


def bytes_of(layers: int, count: int, widths: tuple[int, int]) -> int:
    """What a request has that one source writes for one target: keys and values of the heads that both hold."""
    return 2 * layers * count * TOKENS * HEADS // max(widths) * DIM * 2


def measure(layers: int, count: int, kind: str, widths: tuple[int, int], rounds: int) -> dict[str, Any]:
    """One case."""
    rng = np.random.default_rng(layers + count)
    pool = count + count // 4 + 2
    options = {"mixed": False, "envelope": False}
    sources = [rank("prefill", layers, pool, (n, widths[0]), **options) for n in range(widths[0])]
    targets = [rank("decode", layers, pool, (n, widths[1]), **options) for n in range(widths[1])]
    assignment = next(each for each in plan.route(sources, targets) if (each.source, each.target) == (0, 0))
    pair = plan.compile_pair(sources[0], targets[0], assignment)
    part = pair.components["kv"]
    tokens = count * TOKENS
    there = plan.pushed(part.source, tokens, 0, (0, tokens), indices(kind, count, pool, rng))
    here = plan.required(part.target, tokens, 0, indices(kind, count, pool, rng))
    owed = plan.due(part.source, part.target, tokens, 0)

    def request() -> int:
        return blocks_of(plan.plan_move(part, there, here, owed))

    produced = request()
    moved = sum(int(batch.nbytes.sum()) for batch in plan.plan_move(part, there, here, owed).blocks())
    if moved != bytes_of(layers, count, widths):
        sys.exit(f"the blocks have {moved} bytes, and the request has {bytes_of(layers, count, widths)}")
    took = best(request, rounds)
    return {
        "layers": layers,
        "items": count,
        "kind": kind,
        "tp": f"{widths[0]}->{widths[1]}",
        "blocks": produced,
        "bytes": moved,
        "us": round(took * 1e6, 1),
        "ns_per_block": round(took * 1e9 / produced, 2),
    }


def compiling(what: str, rounds: int) -> dict[str, Any]:
    """Compile time and memory per peer: 96 layers, TP 8 to 4."""
    options = {"mixed": what == "mixed", "envelope": what == "envelope"}
    sources = [rank("prefill", 96, 1024, (n, 8), **options) for n in range(8)]
    targets = [rank("decode", 96, 1024, (n, 4), **options) for n in range(4)]
    assignment = next(each for each in plan.route(sources, targets) if (each.source, each.target) == (0, 0))
    took = best(lambda: plan.compile_pair(sources[0], targets[0], assignment), rounds)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = plan.compile_pair(sources[0], targets[0], assignment)
    nbytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    route = best(lambda: plan.route(sources, targets), max(3, rounds // 10))
    return {
        "compile": what,
        "ms": round(took * 1e3, 2),
        "KiB": round(nbytes / 1024, 1),
        "route_ms": round(route * 1e3, 2),
        "components": len(kept.components),
    }


def matching(widths: tuple[int, int], rounds: int) -> dict[str, Any]:
    """What a decode rank does once for an instance of prefill that it meets: 96 layers."""
    options = {"mixed": False, "envelope": False}
    sources = [rank("prefill", 96, 1024, (n, widths[0]), **options) for n in range(widths[0])]
    targets = [rank("decode", 96, 1024, (n, widths[1]), **options) for n in range(widths[1])]
    some = max(3, rounds // 10)
    return {
        "match": f"{widths[0]}->{widths[1]}",
        "ms": round(best(lambda: plan.match(sources, targets), some) * 1e3, 2),
        "route_ms": round(best(lambda: plan.route(sources, targets), some) * 1e3, 2),
        "KiB_a_rank": round(len(msgspec.msgpack.encode(sources[0])) / 1024, 1),
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    for widths in ((1, 1), (8, 8), (8, 4), (16, 16), (64, 64)):
        show(matching(widths, arguments.rounds), arguments.json)
    for what in ("shared", "mixed", "envelope"):
        show(compiling(what, arguments.rounds), arguments.json)
    show(measure(32, 1, "contiguous", (1, 1), arguments.rounds), arguments.json)
    for layers in (32, 96):
        for count in (512, 4096, 16384):
            for kind in ("contiguous", "half", "random"):
                show(measure(layers, count, kind, (1, 1), arguments.rounds), arguments.json)
    show(measure(32, 512, "random", (8, 4), max(3, arguments.rounds // 3)), arguments.json)


if __name__ == "__main__":
    main()
