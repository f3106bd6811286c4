"""One rank under load: a process that opens rooms as told, looks at every byte, and counts what it holds.

Prefill is cut by layers and decode by heads, so that each rank of one side works with each rank of the other.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import statelink
from statelink import state

RANKS, HEADS, PAGE = 2, 2, 4
POISON = 0x5A

Array = npt.NDArray[np.uint8]


class Rank:
    """One rank's pools of pages, of which each room gets one.

    Args:
        role: ``prefill`` or ``decode``.
        number: Its rank.
        pages: Rooms that it can hold at once.
    """

    def __init__(self, role: str, number: int, pages: int) -> None:
        self.layers = [number] if role == "prefill" else list(range(RANKS))
        self.heads = [*range(HEADS)] if role == "prefill" else [number]
        tp = (0, 1) if role == "prefill" else (number, RANKS)
        shape = (pages, PAGE, len(self.heads), 8)
        self.pools = {n: (np.full(shape, POISON, np.uint8), np.full(shape, POISON, np.uint8)) for n in self.layers}
        self.free = collections.deque(range(pages))
        parts = [state.kv_pages(self.pools, heads=HEADS, tp=tp)]
        self.inventory = state.describe(role, parts, rank=number, ranks=RANKS)

    def places(self, room: int, page: int) -> Iterator[tuple[Array, Array]]:
        """Per pool: the room's page, and what belongs there."""
        for layer, pair in self.pools.items():
            for part, pool in enumerate(pair):
                wanted = np.empty(pool.shape[1:], np.uint8)
                wanted[:] = np.frombuffer(room.to_bytes(8, "little"), np.uint8)
                wanted += np.uint8(16 * layer + 8 * part) + np.array(self.heads, np.uint8)[None, :, None]
                yield pool[page], wanted

    def fill(self, room: int, page: int) -> None:
        for place, wanted in self.places(room, page):
            place[:] = wanted

    def take(self, room: int, page: int) -> bool:
        """Whether every byte of a room is here; the page is poisoned for the next."""
        good = True
        for place, wanted in self.places(room, page):
            good &= bool((place == wanted).all())
            place[:] = POISON
        return good


class Load:
    """Rooms of one link: at most ``window`` at once, until so many have ended."""

    def __init__(self, link: statelink.Link, rank: Rank, peers: list[str]) -> None:
        self.link, self.rank, self.peers = link, rank, peers
        self.live: dict[int, tuple[statelink.Room, int]] = {}
        self.held: dict[str, int] = {}

    def run(self, first: int, count: int, window: int) -> dict[str, Any]:
        began = time.monotonic()
        ended = collections.Counter[str]()
        reasons: list[str] = []
        wrong, most = 0, 0
        todo = iter(range(first, first + count))
        while ended.total() < count:
            while len(self.live) < window and (room := next(todo, None)) is not None:
                self.open(room)
            most = max(most, len(self.live))
            for changed in self.link.changes(1.0):
                if changed.status not in (statelink.Status.SUCCEEDED, statelink.Status.FAILED) or not changed.quiesced:
                    continue
                if self.live.get(changed.room, (None,))[0] is not changed:
                    continue  # told twice: it ended, and its memory came to rest
                page = self.live.pop(changed.room)[1]
                ended[changed.status.name.lower()] += 1
                if changed.reason is not None and len(reasons) < 5:
                    reasons.append(str(changed.reason))
                if isinstance(changed, statelink.Receiving):
                    wrong += not self.rank.take(changed.room, page)
                self.rank.free.append(page)
        return {
            "ended": ended,
            "wrong": wrong,
            "most": most,
            "reasons": reasons,
            "seconds": time.monotonic() - began,
            **usage(),
        }

    def open(self, room: int) -> None:
        page = self.rank.free.popleft()
        opened: statelink.Room
        if self.link.inventory.instance == "prefill":
            self.rank.fill(room, page)
            sending = self.link.send(room, PAGE)
            sending.push({"kv": [page]})
            opened = sending
        else:
            opened = self.link.receive(room, self.peers, PAGE, {"kv": [page]})
        self.live[room] = opened, page


def usage() -> dict[str, int]:
    """What this process holds: resident bytes, descriptors, threads."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def rest(link: statelink.Link) -> dict[str, Any]:
    """A link's view of itself, once it has let go of the last rooms: it does so after it has told of their end."""
    until = time.monotonic() + 5
    while any((seen := link.snapshot())["rooms"].values()) and time.monotonic() < until:
        time.sleep(0.01)
    return seen


def main() -> None:
    """Open a link, and run what the test asks for, line by line."""
    role, number, backend, pages, listen, *siblings = sys.argv[1:]
    rank = Rank(role, int(number), int(pages))
    config = {"role": role, "backend": backend, "listen": listen, "siblings": siblings, "deadline": 900.0}
    with statelink.open(config, rank.inventory) as link:
        print(json.dumps({"address": link.address}), flush=True)
        peers = json.loads(sys.stdin.readline())["peers"]
        load = Load(link, rank, peers)
        for line in sys.stdin:
            result = load.run(**json.loads(line))
            print(json.dumps({**result, "snapshot": rest(link)}, default=str), flush=True)


if __name__ == "__main__":
    main()
