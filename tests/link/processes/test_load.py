"""Many rooms between 2×2 processes: nothing is lost, every byte is looked at, and nothing grows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.helpers.processes import Process
from tests.load.rank import RANKS

from statelink.testing import free_addresses

MIB = 1 << 20
Results = dict[str, dict[str, Any]]


class Fleet:
    """The four ranks."""

    def __init__(self, backend: str, pages: int) -> None:
        own = {role: free_addresses(RANKS) for role in ("prefill", "decode")}
        self.ranks: dict[str, Process] = {}
        for role, listed in own.items():
            for n, address in enumerate(listed):
                siblings = [other for other in listed if other != address and role == "decode"]
                process = Process("tests.load.rank", role, n, backend, pages, address, *siblings)
                self.ranks[f"{role} {n}"] = process
        for process in self.ranks.values():
            process.hear(60)
            process.say(peers=own["prefill"])
        self._next = 1

    def run(self, count: int, window: int, patience: float = 60.0) -> Results:
        """So many rooms, at most ``window`` of them at once; what each rank says when all have ended."""
        first = self._next
        self._next += count
        for process in self.ranks.values():
            process.say(first=first, count=count, window=window)
        found = {name: process.hear(patience) for name, process in self.ranks.items()}
        for name, result in found.items():
            assert result["ended"] == {"succeeded": count}, (name, result)
            assert result["wrong"] == 0, name
            assert not any(result["snapshot"]["rooms"].values()), name
            assert result["snapshot"]["quarantined"] == [], name
        return found


@contextmanager
def fleet(backend: str, pages: int) -> Iterator[Fleet]:
    made = Fleet(backend, pages)
    try:
        yield made
    finally:
        for process in made.ranks.values():
            process.end()


def flat(before: Results, after: Results, slack: int) -> None:
    """Nothing that a rank holds has grown, but for what an allocator keeps."""
    for name, now in after.items():
        then = before[name]
        assert now["rss"] - then["rss"] < slack, f"{name} grew by {(now['rss'] - then['rss']) / MIB:.1f} MiB"
        assert now["fds"] <= then["fds"], name
        assert now["threads"] <= then["threads"], name


def show(what: str, results: Results) -> None:
    for name, each in results.items():
        print(
            f"{what:12} {name:10} {sum(each['ended'].values()) / each['seconds']:6.0f} rooms/s, most {each['most']:5},"
            f" rss {each['rss'] / MIB:6.1f} MiB, {each['fds']} fds, {each['threads']} threads"
        )


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_some_load(backend: str) -> None:
    with fleet(backend, 200) as ranks:
        ranks.run(200, 200)
        ranks.run(1500, 32)  # until the allocators of all threads have what they need
        before = ranks.run(600, 32)
        after = ranks.run(600, 32)
        show("after", after)
        # Rooms that stay in memory, of two kibibytes and more each, would be seen here.
        flat(before, after, MIB)


@pytest.mark.soak
def test_a_hundred_thousand_rooms(backend: str) -> None:
    with fleet(backend, 64) as ranks:
        results = []
        for part in range(10):
            results.append(ranks.run(10_000, 64, 600.0))
            show(f"{(part + 1) * 10_000}", results[-1])
        flat(results[6], results[9], 4 * MIB)


@pytest.mark.soak
def test_ten_thousand_rooms_at_once(backend: str) -> None:
    with fleet(backend, 10_000) as ranks:
        results = []
        for part in range(3):
            results.append(ranks.run(10_000, 10_000, 600.0))
            show(f"burst {part}", results[-1])
        flat(results[1], results[2], 8 * MIB)
