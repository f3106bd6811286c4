"""How the cost of a request and the memory of a link grow: with peers, with rooms in flight, and with items.

`python -m benchmarks --suite growth` measures it:

    peers       one prefill link and 1 to 64 decode links: milliseconds to connect a peer, and microseconds a room
    in flight   small rooms between two links, 1 to 10,000 at once: microseconds a room
    items       one request of 512 to 65,536 pages of 512 bytes: nanoseconds an item, for pages in order and at random
    memory      bytes that a link, a peer and a room in flight take, and after 110,000 rooms

Both sides run in one process, so that absolute times are those of both. What counts is that no cost per peer, room or
item rises.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np

import statelink
from statelink import state

from .rooms import TOKENS, Pools

PEERS = (1, 4, 16, 64)
IN_FLIGHT = (1, 10, 100, 1_000, 10_000)
ITEMS = (512, 2_048, 8_192, 32_768, 65_536)
DIM = 4
Row = dict[str, Any]


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def opened(backend: str, source: state.Inventory, target: state.Inventory) -> Iterator[list[statelink.Link]]:
    """A prefill and a decode link."""
    with (
        statelink.open({"role": "prefill", "backend": backend, "inspect": False}, source) as prefill,
        statelink.open({"role": "decode", "backend": backend, "inspect": False}, target) as decode,
    ):
        yield [prefill, decode]


def play(prefill: statelink.Link, decode: statelink.Link, pools: list[Pools], first: int, rooms: int) -> float:
    """So many small rooms at once; seconds until all have succeeded on both sides."""
    began = time.perf_counter()
    receiving = [
        decode.receive(first + n, prefill.address, TOKENS, pools[1].items[n], deadline=300.0) for n in range(rooms)
    ]
    sending = [prefill.send(first + n, TOKENS, deadline=300.0) for n in range(rooms)]
    for n, room in enumerate(sending):
        room.push(pools[0].items[n])
    for each in (*receiving, *sending):
        each.wait(300, quiesced=True)
        each.check()
    took = time.perf_counter() - began
    for link in (prefill, decode):
        link.changes()  # a link keeps the last thousands of rooms for who asks for changes
    return took


def peers(backend: str, rounds: int) -> Iterator[Row]:
    """Costs beside other peers."""
    for count in PEERS:
        pools = Pools("prefill", 1, DIM), Pools("decode", 1, DIM)
        with contextlib.ExitStack() as stack:
            prefill, decode = stack.enter_context(opened(backend, pools[0].inventory, pools[1].inventory))
            config = {"role": "decode", "backend": backend, "inspect": False}
            others = [stack.enter_context(statelink.open(config, pools[1].inventory)) for _ in range(count - 1)]
            before, connecting = resident(), []
            everyone = [decode, *others]
            for number, each in enumerate(everyone):
                connecting.append(play(prefill, each, list(pools), 1 + number, 1))
            held = resident() - before
            took = [
                play(prefill, each, list(pools), 1000 * (1 + turn) + number, 1)
                for turn in range(rounds)
                for number, each in enumerate(everyone)
            ]
            row = {"growth": "peers", "backend": backend, "count": count}
            row |= {"first_room_ms": round(statistics.median(connecting) * 1e3, 2)}
            yield row | {"us": round(statistics.median(took) * 1e6), "KiB_a_peer": round(held / count / 1024, 1)}


def in_flight(backend: str, rounds: int) -> Iterator[Row]:
    """Costs beside other rooms."""
    for count in IN_FLIGHT:
        pools = [Pools("prefill", count, DIM), Pools("decode", count, DIM)]
        with opened(backend, pools[0].inventory, pools[1].inventory) as (prefill, decode):
            play(prefill, decode, pools, 1, min(count, 50))
            turns = max(3, min(rounds, 3000 // count))
            took = [play(prefill, decode, pools, 100_000 * (1 + turn), count) / count for turn in range(turns)]
            yield {
                "growth": "in flight",
                "backend": backend,
                "count": count,
                "us": round(statistics.median(took) * 1e6),
            }


def items(backend: str, rounds: int) -> Iterator[Row]:
    """Costs of an item."""
    for count in ITEMS:
        shape = (count, 16, 1, 16)
        arrays = [{0: (np.zeros(shape, np.uint8), np.zeros(shape, np.uint8))} for _ in range(2)]
        inventories = [
            state.describe(name, [state.kv_pages(each, heads=1)])
            for name, each in zip(("prefill", "decode"), arrays, strict=True)
        ]
        rng = np.random.default_rng(count)
        with opened(backend, *inventories) as (prefill, decode):
            for order in ("in order", "random"):
                took = []
                for turn in range(rounds + 2):
                    ids = [rng.permutation(count) if order == "random" else np.arange(count) for _ in range(2)]
                    room = 1 + turn + (1000 if order == "random" else 0)
                    began = time.perf_counter()
                    receiving = decode.receive(room, prefill.address, count * 16, {"kv": ids[1]})
                    sending = prefill.send(room, count * 16)
                    sending.push({"kv": ids[0]})
                    receiving.wait(120)
                    took.append((time.perf_counter() - began) / count)
                    receiving.check()
                row = {"growth": "items", "backend": backend, "count": count, "order": order}
                yield row | {"ns": round(statistics.median(took[2:]) * 1e9)}


def memory(backend: str) -> Iterator[Row]:
    """Bytes of a link and of a room in flight, and of those that are over."""
    count = 10_000
    pools = [Pools("prefill", count, DIM), Pools("decode", count, DIM)]
    for each in pools:
        for array in (*each.window[0], *each.window[1], each.conv[2], each.ssm[2], each.row):
            array[:] = 0  # so that no page is touched for the first time later
    with opened(backend, pools[0].inventory, pools[1].inventory) as (prefill, decode):
        play(prefill, decode, pools, 1, 50)
        config = {"role": "decode", "backend": backend, "inspect": False}
        before = resident()
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(statelink.open(config, pools[1].inventory))
            yield {"memory": "a link", "backend": backend, "KiB": round((resident() - before) / 8 / 1024, 1)}
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        waiting = [decode.receive(1000 + n, prefill.address, TOKENS, pools[1].items[n]) for n in range(count)]
        time.sleep(2.0)
        held = (tracemalloc.get_traced_memory()[0] - before) / count
        tracemalloc.stop()
        yield {"memory": "a room in flight, both sides", "backend": backend, "KiB": round(held / 1024, 2)}
        for room in waiting:
            room.abort("measured")
        for room in waiting:
            room.wait(60, quiesced=True)
        del waiting, room
        first = 1_000_000
        for rooms in (10_000, 100_000):
            before = resident()
            for _ in range(rooms // 100):
                play(prefill, decode, pools, first, 100)
                first += 100
            grown = (resident() - before) / 2**20
            yield {"memory": f"{rooms:,} more rooms that are over", "backend": backend, "MiB": round(grown, 2)}


def rows(backend: str, rounds: int) -> Iterator[Row]:
    """All of it."""
    yield from peers(backend, rounds)
    yield from in_flight(backend, rounds)
    yield from items(backend, rounds)
    yield from memory(backend)
