"""Workload D: prefill and decode of unequal width, where plans shatter: each block is one token's heads.

    python -m benchmarks.unequal [--backend tcp nixl mooncake] [--dim 32 128 512] [--rounds 30] [--ring 64]
                                 [--memory host] [--json]

Prefill has four ranks, decode two. Pages have 16 tokens of 8 KV heads, with the heads inside (NHD). Beside them is a
recurrent state with a convolution in three groups. Each round takes these ways, one right after the other:

    direct    every block by itself
    staged    through staging rings
    whole     the same bytes between equal widths, so that every page is one block

All ranks of a side live in one process. A request is timed on decode, from ``receive`` on both ranks to the success of
both, and its bytes are checked after every round.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import socket
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import statelink
from statelink import state

from .memory import HOST, moved, seen
from .pairs import in_turn, ratio
from .rows import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection

TOKENS, LAYERS, HEADS, PAGES = 16, 8, 8, 64
WIDTH, KERNEL, STATE_HEADS = 512, 4, 16
PREFILL, DECODE = 4, 2
WAYS = {"direct": PREFILL, "staged": PREFILL, "whole": DECODE}
"""How many ranks prefill has."""


class Rank:
    """One rank's pools: pages and a recurrent state, which are the rank's share of the same numbers on both sides."""

    def __init__(self, name: str, dim: int, rank: int, ranks: int, memory: str) -> None:
        rng = np.random.default_rng(7)
        share = np.arange(HEADS // ranks * rank, HEADS // ranks * (rank + 1))
        groups = [WIDTH // 4, WIDTH // 4, WIDTH // 2]
        starts = itertools.accumulate([0, *groups[:-1]])
        channels = np.concatenate(
            [
                np.arange(start + size // ranks * rank, start + size // ranks * (rank + 1))
                for start, size in zip(starts, groups, strict=True)
            ]
        )
        state_heads = np.arange(STATE_HEADS // ranks * rank, STATE_HEADS // ranks * (rank + 1))
        pages = (PAGES, TOKENS, HEADS, dim)

        def part(low: int, high: int, shape: tuple[int, ...], dtype: Any, chosen: Any, axis: int) -> Any:
            whole = rng.integers(low, high, shape).astype(dtype)
            return moved(np.take(whole, chosen, axis=axis), memory)

        self.kv = {
            n: (part(0, 1 << 15, pages, np.int16, share, 2), part(0, 1 << 15, pages, np.int16, share, 2))
            for n in range(LAYERS)
        }
        self.conv = {LAYERS: part(0, 255, (2, WIDTH, KERNEL), np.uint8, channels, 1)}
        self.ssm = {LAYERS: part(0, 1 << 15, (2, STATE_HEADS, 16, 16), np.float32, state_heads, 1)}
        self.inventory = state.describe(
            name,
            [
                state.kv_pages(self.kv, heads=HEADS, tp=(rank, ranks)),
                state.mamba_slots(
                    conv=self.conv, ssm=self.ssm, heads=STATE_HEADS, conv_groups=groups, tp=(rank, ranks)
                ),
            ],
            rank=rank,
            ranks=ranks,
        )

    def arrays(self) -> list[Any]:
        """All of it."""
        return [*itertools.chain(*self.kv.values()), *self.conv.values(), *self.ssm.values()]


def addresses(count: int) -> list[str]:
    """Free addresses of this machine."""
    with contextlib.ExitStack() as held:
        ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]
    return [f"tcp://127.0.0.1:{port}" for port in ports]


def opened(
    role: str, backend: str, ring: int, ranks: Mapping[str, Sequence[Rank]], stack: contextlib.ExitStack
) -> dict[str, list[statelink.Link]]:
    """The links of one side, for each way one on every rank."""
    links = {}
    for way, held in ranks.items():
        staging = {"mode": "always", "ring_bytes": ring} if way == "staged" else None
        config = {"role": role, "backend": backend, "staging": staging}
        known = addresses(len(held))
        links[way] = [
            stack.enter_context(
                statelink.open(
                    {**config, "listen": own, "siblings": [each for each in known if each != own]}, rank.inventory
                )
            )
            for own, rank in zip(known, held, strict=True)
        ]
    return links


def prefill(backend: str, dim: int, ring: int, memory: str, pipe: Connection) -> None:
    """The sending process."""
    with contextlib.ExitStack() as stack:
        ranks = {
            way: [Rank(f"prefill-{way}", dim, rank, count, memory) for rank in range(count)]
            for way, count in WAYS.items()
        }
        links = opened("prefill", backend, ring, ranks, stack)
        pipe.send({way: [link.address for link in each] for way, each in links.items()})
        for room in itertools.count(1):
            way = pipe.recv()
            if not way:
                break
            rooms = [link.send(room, PAGES * TOKENS) for link in links[way]]
            for each in rooms:
                each.push({"kv": np.arange(PAGES), "mamba": [1]})
            for each in rooms:
                each.wait(120)
                each.check()


def measure(backend: str, dim: int, rounds: int, ring: int, memory: str = HOST) -> dict[str, Any]:
    """One size of head over one backend."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(backend, dim, ring, memory, theirs), daemon=True)
    process.start()
    ranks = [Rank("decode", dim, rank, DECODE, memory) for rank in range(DECODE)]
    wanted = [[seen(array).copy() for array in rank.arrays()] for rank in ranks]
    order = np.random.default_rng(1).permutation(PAGES)
    items = {"kv": order, "mamba": [1]}
    reports: dict[str, Any] = {}
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:
        links = opened("decode", backend, ring, dict.fromkeys(WAYS, ranks), stack)
        prefills = pipe.recv()

        def request(way: str) -> float:
            for array in itertools.chain(*(rank.arrays() for rank in ranks)):
                array[:] = 0
            pipe.send(way)
            room = next(numbers)
            began = time.perf_counter()
            rooms = [link.receive(room, prefills[way], PAGES * TOKENS, items) for link in links[way]]
            for each in rooms:
                each.wait(120)
            took = time.perf_counter() - began
            for each in rooms:
                each.check()
            for rank, whole in zip(ranks, wanted, strict=True):
                for array, expected in zip(rank.arrays(), whole, strict=True):
                    if len(array) == PAGES:
                        np.testing.assert_array_equal(seen(array)[order], expected)
                    else:
                        np.testing.assert_array_equal(seen(array)[1], expected[1])
            reports[way] = [each.report.moved for each in rooms]
            return took

        ways = {way: partial(request, way) for way in WAYS}
        took = list(in_turn(ways, rounds))
        pipe.send("")
    process.join(30)
    times = {way: [each[way] for each in took] for way in WAYS}
    parts = {way: [part for each in rooms for part in each.values()] for way, rooms in reports.items()}
    return {
        "workload": "D",
        "backend": backend,
        "memory": memory,
        "block_bytes": HEADS // PREFILL * dim * 2,
        "MiB": round(sum(each.nbytes for each in parts["whole"]) / 2**20, 1),
        **{f"{way}_blocks": sum(each.blocks for each in parts[way]) for way in WAYS},
        **{f"{way}_ms": round(statistics.median(times[way]) * 1e3, 2) for way in WAYS},
        "direct_over_whole": ratio(times["direct"], times["whole"]),
        "staged_over_whole": ratio(times["staged"], times["whole"]),
        "direct_over_staged": ratio(times["direct"], times["staged"]),
    }


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["tcp"])
    parser.add_argument("--dim", type=int, nargs="+", default=[32, 128, 512], help="elements of a head")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ring", type=int, default=64, help="MiB of a ring")
    parser.add_argument("--memory", default=HOST, help="host, or a device as torch names it, such as cuda:0")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for dim, backend in itertools.product(arguments.dim, arguments.backend):
        row = measure(backend, dim, arguments.rounds, arguments.ring << 20, arguments.memory)
        show(row, arguments.json)


if __name__ == "__main__":
    main()
