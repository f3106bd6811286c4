"""Many rooms between 2×2 processes: nothing is lost, every byte is looked at, and nothing grows.

Prefill is cut by layers and decode by heads, so that each rank of one side works with each rank of the other.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.helpers.fleet import Group
from tests.helpers.peers import until
from tests.helpers.pools import Kv

import statelink

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle
    from tests.helpers.worker import Host
    from tests.link.conftest import TwoEngines

RANKS, HEADS, PAGE = 2, 2, 4
PATIENT: dict[str, Any] = {"deadline": 900.0, "heartbeat": 1.0, "liveness": 10.0}
POISON = 0x5A
MIB = 1 << 20
Results = dict[str, dict[str, Any]]


def own_bytes(host: Host, key: str, room: int, page: int) -> Iterator[tuple[npt.NDArray[np.uint8], Any]]:
    """Of each array of a rank: the room's page, and what belongs there."""
    memory = host.memories[key]
    (pool,) = memory.pools
    assert isinstance(pool, Kv)
    heads = np.arange(pool.tp[0], pool.tp[0] + HEADS // pool.tp[1]).astype(np.uint8)
    tag = np.frombuffer(room.to_bytes(8, "little"), np.uint8)
    for label, array in memory.arrays["kv"].items():
        _, layer, part = label.split(".")
        yield array[page], tag + np.uint8(16 * int(layer) + 8 * "kv".index(part)) + heads[None, :, None]


def play(host: Host, key: str, peers: list[str], first: int, count: int, window: int) -> dict[str, Any]:
    """Runs in a rank's process: open so many rooms, at most ``window`` at once, and look at every byte of them."""
    link, sends = host.links[key], not peers
    free = collections.deque(range(host.memories[key].count("kv")))
    live: dict[int, tuple[statelink.Room, int]] = {}
    began = time.monotonic()
    link.changes(0.0)  # before this, few changes are kept, and the first rooms may end before all are open
    ended = collections.Counter[str]()
    reasons: list[str] = []
    wrong, most = 0, 0
    todo = iter(range(first, first + count))
    while ended.total() < count:
        while len(live) < window and (number := next(todo, None)) is not None:
            page = free.popleft()
            opened: statelink.Room
            for place, wanted in own_bytes(host, key, number, page):
                place[:] = wanted if sends else POISON
            if sends:
                opened = link.send(number, PAGE)
                opened.push({"kv": [page]})
            else:
                opened = link.receive(number, peers, PAGE, {"kv": [page]})
            live[number] = opened, page
        most = max(most, len(live))
        for room in link.changes(1.0):
            if room.status not in (statelink.Status.SUCCEEDED, statelink.Status.FAILED) or not room.quiesced:
                continue
            if live.get(room.room, (None,))[0] is not room:
                continue  # told twice: it ended, and its memory came to rest
            page = live.pop(room.room)[1]
            ended[room.status.name.lower()] += 1
            if room.reason is not None and len(reasons) < 5:
                reasons.append(str(room.reason))
            if not sends:
                wrong += not all(
                    bool((place == wanted).all()) for place, wanted in own_bytes(host, key, room.room, page)
                )
            free.append(page)
    seconds = time.monotonic() - began
    return {"ended": ended, "wrong": wrong, "most": most, "reasons": reasons, "seconds": seconds, **host.usage()}


class Load:
    """Four ranks, each in a process of its own.

    Args:
        two_engines: Where processes come from.
        pages: Rooms that a rank can hold at once.
    """

    def __init__(self, two_engines: TwoEngines, pages: int) -> None:
        common: dict[str, Any] = {"pages": pages, "page": PAGE, "heads": HEADS, "dim": 8, "dtype": "uint8"}
        pools = {
            "prefill": [Kv(layers=(rank,), **common) for rank in range(RANKS)],
            "decode": [Kv(layers=tuple(range(RANKS)), tp=(rank, RANKS), **common) for rank in range(RANKS)],
        }
        self.links: dict[str, LinkHandle] = {}
        for role, each in pools.items():
            group = Group(two_engines, role, [[pool] for pool in each], two_engines.start(RANKS), **PATIENT)
            self.links |= {f"{role} {rank}": link for rank, link in enumerate(group.links)}
        for link in self.links.values():
            link.memory.bytes[:] = POISON
        self._prefill = [link.address for name, link in self.links.items() if name.startswith("prefill")]
        self._next = 1

    def run(self, count: int, window: int, patience: float = 60.0) -> Results:
        """So many rooms, at most ``window`` of them at once; what each rank says when all have ended."""
        first = self._next
        self._next += count
        for name, link in self.links.items():
            peers = self._prefill if name.startswith("decode") else []
            link.engine.start(play, link.key, peers, first, count, window)
        found = {name: link.engine.result(patience) for name, link in self.links.items()}
        for name, result in found.items():
            assert result["ended"] == {"succeeded": count}, (name, result)
            assert result["wrong"] == 0, name
            until(lambda link=self.links[name]: not any(link.snapshot()["rooms"].values()), 5.0)  # type: ignore[misc]
            assert self.links[name].snapshot()["quarantined"] == [], name
        return found


THREADS = 12
"""Most threads of a process with one link: the main and the control thread, those of the pools (two that move, two that
connect, one that grants, one that reads) and its library's. A pool starts a thread whenever all of its own are busy."""


def flat(before: Results, after: Results, slack: int, blocks: float = 0.5) -> None:
    """No rank holds more than before, but for so many blocks of Python's memory a room, and what allocators keep.

    Prefill remembers the last 65,536 uses of ids, one for each decode rank of a room, and the ends of the last 16,384
    rooms for its other ranks. After these, it keeps none.
    """
    for name, now in after.items():
        then = before[name]
        assert now["blocks"] - then["blocks"] < blocks * now["ended"].total(), f"{name} keeps rooms"
        assert now["rss"] - then["rss"] < slack, f"{name} grew by {(now['rss'] - then['rss']) / MIB:.1f} MiB"
        assert now["fds"] <= then["fds"], name
        assert now["threads"] <= max(then["threads"], THREADS), name


def show(what: str, results: Results) -> None:
    for name, each in results.items():
        print(
            f"{what:12} {name:10} {sum(each['ended'].values()) / each['seconds']:6.0f} rooms/s, most {each['most']:5},"
            f" {each['blocks']} blocks, rss {each['rss'] / MIB:6.1f} MiB, {each['fds']} fds, {each['threads']} threads"
        )


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_some_load(two_engines: TwoEngines) -> None:
    load = Load(two_engines, 200)
    load.run(200, 200)
    load.run(800, 32)  # until the allocators of all threads have what they need
    runs = [load.run(400, 32) for _ in range(4)]
    show("after", runs[-1])
    # An allocator takes more memory in one run or another. Rooms that stay, of 2 KiB and more each, take it in all.
    for name in load.links:
        pairs = itertools.pairwise([run[name] for run in runs])
        before, after = min(pairs, key=lambda pair: pair[1]["rss"] - pair[0]["rss"])
        flat({name: before}, {name: after}, 768 << 10, 40)


@pytest.mark.soak  # minutes: a leak of a few bytes a room shows only after so many
def test_a_hundred_thousand_rooms(two_engines: TwoEngines) -> None:
    load = Load(two_engines, 64)
    results = []
    for part in range(10):
        results.append(load.run(10_000, 64, 600.0))
        show(f"{(part + 1) * 10_000}", results[-1])
    flat(results[6], results[9], 4 * MIB)


@pytest.mark.soak  # minutes: six times ten thousand rooms over each backend
def test_ten_thousand_rooms_at_once(two_engines: TwoEngines) -> None:
    load = Load(two_engines, 10_000)
    results = []
    for part in range(6):
        results.append(load.run(10_000, 10_000, 600.0))
        show(f"burst {part}", results[-1])
    flat(results[4], results[5], 8 * MIB)
