"""A room id is used again after an abort, while the other side still is at an earlier use, or already at a later one.

Each side goes from use to use at its own pace, and none waits for the other. No use may succeed with the bytes of
another, and none on one side alone. Every use has a tag that fills its pages; the test fills them and looks at them
itself.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.pools import Kv

from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle, RoomHandle
    from tests.helpers.pools import Memory
    from tests.helpers.worker import Seen
    from tests.link.conftest import TwoEngines

SHORT, LONG = 60, 3000
"""Ids of a run; each has two or three uses."""
POOLS = (Kv(layers=(0, 1), pages=64, heads=2),)
ENDED = (Status.FAILED, Status.SUCCEEDED)
PAGES = 2
"""Pages of a request."""
PAGE = 16
WINDOW = 6
"""Ids that are in use at once."""
TURNS = 100
"""Turns after which a room whose other side will not speak of it any more is given up."""
USES = 3
"""Most uses of an id. Of these, prefill serves the last one for certain."""


@dataclass
class Tally:
    """What a run came to.

    Attributes:
        ids: Room ids.
        aborted: Uses that ended in failure on prefill.
        succeeded: Uses that succeeded on decode.
        wrong: Uses that succeeded on decode with bytes of something else, or on prefill alone.
        foreign: Pages that changed while they were free.
        unserved: Last uses that did not succeed.
        orphans: Uses of decode that waited on when prefill was through with their id.
        reasons: Failed uses of decode, by code.
        found: The first of what is wrong, in words.
    """

    ids: int = 0
    aborted: int = 0
    succeeded: int = 0
    wrong: int = 0
    foreign: int = 0
    unserved: int = 0
    orphans: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if len(self.found) < 10:
            self.found.append(what)

    def __str__(self) -> str:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(self.reasons.items()))
        return (
            f"{self.aborted} aborted uses of {self.ids} ids, {self.succeeded} succeeded, "
            f"{self.wrong} wrong successes, {self.foreign} foreign pages, {self.unserved} last uses not served, "
            f"{self.orphans} left alone ({codes})"
        )


class Pool:
    """Pages of one side. A page that is free holds a tag of its own, and is looked at when it is taken again."""

    def __init__(self, memory: Memory, tags: Iterator[int], tally: Tally) -> None:
        self._arrays = list(memory.arrays["kv"].values())
        self._tags, self._tally = tags, tally
        self._free: dict[int, int] = {}
        self.give(range(len(self._arrays[0])))

    def holds(self, page: int, tag: int) -> bool:
        return all(bool((array[page] == tag).all()) for array in self._arrays)

    def fill(self, pages: list[int], tag: int) -> None:
        for array in self._arrays:
            array[pages] = tag

    def give(self, pages: Any) -> None:
        """Somebody else writes to them at once."""
        for page in pages:
            self._free[page] = next(self._tags)
            self.fill([page], self._free[page])

    def take(self) -> list[int]:
        taken = list(itertools.islice(self._free, PAGES))
        assert len(taken) == PAGES, "the pool is too small for this test"
        for page in taken:
            self._look(page, self._free.pop(page))
        return taken

    def sweep(self) -> None:
        """Look at every page that is free."""
        for page, tag in self._free.items():
            self._look(page, tag)

    def _look(self, page: int, tag: int) -> None:
        if not self.holds(page, tag):
            self._tally.foreign += 1
            self._tally.note(f"page {page} changed while it was free")


class Sides:
    """Two links, and who owns which page of theirs."""

    def __init__(self, prefill: LinkHandle, decode: LinkHandle) -> None:
        self.prefill, self.decode = prefill, decode
        self.tally = Tally()
        # A tag fills 16 bits: it comes again long after its pages have had other ones.
        tags = (1 + number % 65_535 for number in itertools.count())
        self.tags: Iterator[int] = tags
        self.sources = Pool(prefill.memory, tags, self.tally)
        self.targets = Pool(decode.memory, tags, self.tally)

    def rest(self) -> None:
        for pool in (self.sources, self.targets):
            pool.sweep()


class Id:
    """The uses of one id. Each side is a generator that goes a step further whenever it is its turn."""

    def __init__(self, sides: Sides, room: int, order: random.Random) -> None:
        self._sides, self._room, self._order = sides, room, order
        self._uses = order.randint(2, USES)
        self._tags = [next(sides.tags) for _ in range(self._uses)]
        self._served: set[int] = set()  # uses that succeeded on prefill
        self._taken: set[int] = set()  # uses that succeeded on decode
        self._prefill_is_over = False
        self._decode_is_over = False

    def prefill(self) -> Iterator[None]:
        """Send every use; give all but the last up, at some moment."""
        pool, tally = self._sides.sources, self._sides.tally
        for use, tag in enumerate(self._tags):
            last = use == self._uses - 1
            yield from self._pause()
            pages = pool.take()
            pool.fill(pages, tag)
            sending = self._sides.prefill.send(self._room, PAGES * PAGE)
            if last:
                sending.push({"kv": pages})
            else:
                yield from self._pause()
                if self._order.random() < 0.3:
                    half = self._order.random() < 0.5
                    sending.push({"kv": pages[:1]} if half else {"kv": pages}, span=(0, PAGE * (1 if half else PAGES)))
                sending.abort("as planned")
            seen, _ = yield from self._end(sending, lambda last=last: last and self._decode_is_over)  # type: ignore[misc]
            if seen.status is Status.SUCCEEDED:
                self._served.add(use)
            else:
                tally.aborted += 1
            sending.close()
            pool.give(pages)
        self._prefill_is_over = True

    def decode(self) -> Iterator[None]:
        """Receive every use, one after the other; give some of them up."""
        pool, tally = self._sides.targets, self._sides.tally
        for use, tag in enumerate(self._tags):
            last = use == self._uses - 1
            yield from self._pause()
            pages = pool.take()
            peer = self._sides.prefill.address
            receiving = self._sides.decode.receive(self._room, peer, PAGES * PAGE, {"kv": pages})
            if not last and self._order.random() < 0.3:
                yield from self._pause()
                receiving.abort("as planned")
            seen, orphan = yield from self._end(receiving, lambda: self._prefill_is_over)
            tally.orphans += orphan
            if seen.status is Status.SUCCEEDED:
                tally.succeeded += 1
                self._taken.add(use)
                if not all(pool.holds(page, tag) for page in pages):
                    tally.wrong += 1
                    tally.note(f"use {use} of id {self._room} succeeded with the bytes of something else")
            else:
                assert seen.reason is not None
                tally.reasons[seen.reason.code] += 1
                tally.unserved += last
            receiving.close()
            pool.give(pages)
        self._decode_is_over = True

    def over(self) -> None:
        """Both sides have come to their end."""
        tally = self._sides.tally
        tally.ids += 1
        for use in self._served - self._taken:
            tally.wrong += 1
            tally.note(f"use {use} of id {self._room} succeeded on prefill alone")

    def _pause(self) -> Iterator[None]:
        for _ in range(self._order.choice((0, 0, 1, 3, 10))):
            yield

    def _end(self, room: RoomHandle, unwanted: Callable[[], bool]) -> Generator[None, None, tuple[Seen, bool]]:
        """Wait until a room has come to rest. One that is unwanted and waits on is aborted: second value."""
        turns = 0
        while (seen := room.see()).status not in ENDED or not seen.quiesced:
            turns += unwanted()
            if turns == TURNS:
                room.abort("the other side is through with this id")
            yield
        return seen, turns >= TURNS


def play(sides: Sides, ids: int, seed: int) -> Tally:
    """Use so many ids, several of them at once.

    Args:
        sides: The links.
        ids: How many.
        seed: Of every choice.
    """
    order = random.Random(seed)
    todo = iter(range(1, ids + 1))
    under_way: list[tuple[Id, list[Iterator[None]]]] = []
    while True:
        while len(under_way) < WINDOW and (room := next(todo, None)) is not None:
            made = Id(sides, room, order)
            under_way.append((made, [made.prefill(), made.decode()]))
        if not under_way:
            break
        one = order.choice(under_way)
        side = order.choice(one[1])
        if next(side, side) is side:  # it has come to its end
            one[1].remove(side)
        if not one[1]:
            one[0].over()
            under_way.remove(one)
    sides.rest()
    return sides.tally


def used_again(two_engines: TwoEngines, ids: int) -> Tally:
    seed = int(os.environ.get("STATELINK_SEED") or secrets.randbits(32))
    pair = two_engines.pair(POOLS, POOLS, deadline=30.0)
    tally = play(Sides(pair.prefill, pair.decode), ids, seed)
    print(f"ids used again over {two_engines.backend}, seed {seed}: {tally}")
    assert (tally.wrong, tally.foreign) == (0, 0), (tally.found, tally)
    assert tally.aborted > ids, tally
    assert set(tally.reasons) <= {"room.aborted", "room.reused"}, tally
    assert tally.succeeded > 0.02 * ids, tally
    for link in (pair.prefill, pair.decode):
        seen = link.snapshot()
        assert seen["quarantined"] == []
        assert not any(seen["rooms"].values()), seen
    return tally


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_no_use_of_an_id_gets_the_bytes_of_another(two_engines: TwoEngines) -> None:
    used_again(two_engines, SHORT)


@pytest.mark.soak  # minutes: 3,000 ids over each backend
def test_no_use_of_thousands_of_ids_gets_the_bytes_of_another(
    two_engines: TwoEngines, tell: Callable[[str], None]
) -> None:
    tally = used_again(two_engines, LONG)
    tell(f"ids used again over {two_engines.backend}: {tally}")
