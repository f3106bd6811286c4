"""A prefill link and a decode link, and whole requests between them with every byte looked at."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.helpers.expect import Case, carry, wanted
from tests.helpers.worker import Host

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle, RoomHandle

_rooms = itertools.count(1000)


class Pair:
    """Two links whose memories are known, byte by byte.

    Attributes:
        prefill: The source.
        decode: The destination.
        expected: What decode's memory has to hold.
        untouched: What prefill's memory has to hold: what it held.
    """

    def __init__(self, prefill: LinkHandle, decode: LinkHandle) -> None:
        self.prefill = prefill
        self.decode = decode
        self.expected = decode.memory.copy()
        self.untouched = prefill.memory.copy()
        self._rng = np.random.default_rng(7)
        self._busy: dict[str, set[int]] = {pool.name: set() for pool in decode.memory.pools}

    def beside(self, prefill: LinkHandle) -> Pair:
        """The same decode link, served by another prefill link."""
        made = Pair(prefill, self.decode)
        made.expected, made._busy = self.expected, self._busy
        return made

    @property
    def backend(self) -> str:
        """Name of the backend, as the link says it."""
        return str(self.prefill.snapshot()["backend"])

    def case(self, tokens: int = 200, prefix: int = 0, room: int | None = None) -> Case:
        """A request over items drawn at random; those of decode are nobody else's until `done`."""
        source: dict[str, list[int]] = {}
        target: dict[str, list[int]] = {}
        for pool in self.prefill.memory.pools:
            order = self._rng.permutation(self.prefill.memory.count(pool.name)).tolist()
            source[pool.name] = order[: wanted(pool, tokens)]
        for pool in self.decode.memory.pools:
            order = self._rng.permutation(self.decode.memory.count(pool.name)).tolist()
            free, needed = [n for n in order if n not in self._busy[pool.name]], wanted(pool, tokens, prefix)
            assert len(free) >= needed, f"the pool of {pool.name} is too small for this test"
            target[pool.name] = free[:needed]
            self._busy[pool.name].update(target[pool.name])
        return Case(next(_rooms) if room is None else room, tokens, prefix, source, target)

    def receive(self, case: Case, **named: Any) -> RoomHandle:
        """Open it on decode, and say where it belongs."""
        return self.decode.receive(
            case.room, self.prefill.address, case.tokens, case.target, prefix=case.prefix, **named
        )

    def send(self, case: Case, **named: Any) -> RoomHandle:
        """Open it on prefill."""
        return self.prefill.send(case.room, case.tokens, **named)

    def push(self, sending: RoomHandle, case: Case, *cuts: int, **named: Any) -> None:
        """Push all of it, in chunks that end at ``cuts``."""
        ends = [0, *cuts, case.tokens]
        for first, last in itertools.pairwise(ends):
            sending.push(case.span(first, last, self.prefill.memory.pools), span=(first, last), **named)

    def begin(self, case: Case, **named: Any) -> tuple[RoomHandle, RoomHandle]:
        """Open it on both sides."""
        return self.receive(case, **named), self.send(case, **named)

    def run(self, tokens: int = 200, prefix: int = 0, cuts: tuple[int, ...] = (), room: int | None = None) -> None:
        """One request that goes well, and nothing else happens to any byte."""
        case = self.case(tokens, prefix, room)
        receiving, sending = self.begin(case)
        self.push(sending, case, *cuts)
        self.ended(case, receiving, sending)

    def ended(self, case: Case, receiving: RoomHandle, sending: RoomHandle) -> None:
        """Both sides say that it succeeded; so it is here."""
        receiving.succeeded()
        sending.succeeded()
        self.arrived(case)

    def arrived(self, case: Case) -> None:
        """Look at every byte of both sides, after a request that succeeded."""
        carry([self.prefill.memory], self.expected, case)
        self.done(case)
        self.verify()

    def spoilt(self, case: Case) -> None:
        """A request failed: the items that it named may hold anything, and nothing else has changed."""
        self.pardon(case)
        self.done(case)
        self.verify()

    def pardon(self, case: Case) -> None:
        """Expect whatever the items that a request named hold now."""
        for name, items in case.target.items():
            for label, array in self.expected.arrays[name].items():
                if len(array) and items:
                    array[items] = self.decode.memory.arrays[name][label][items]

    @property
    def all_done(self) -> bool:
        """Whether every request's items were given back."""
        return not any(self._busy.values())

    def done(self, case: Case) -> None:
        """Give the items back."""
        for name, items in case.target.items():
            self._busy[name].difference_update(items)

    def verify(self) -> None:
        """Every byte of both sides is what it should be."""
        for memory, expected in ((self.decode.memory, self.expected), (self.prefill.memory, self.untouched)):
            found = memory.differences(expected)
            assert found == [], found

    def idle(self, timeout: float = 10.0) -> None:
        """Nothing is left of any room, on either side."""
        for link in (self.decode, self.prefill):
            until = time.monotonic() + timeout
            while any((seen := link.snapshot())["rooms"].values()) and time.monotonic() < until:
                time.sleep(0.01)
            assert not any(seen["rooms"].values()), seen
            assert seen["quarantined"] == []

    def errors(self) -> list[str]:
        """What the workers logged as errors."""
        return [each for link in (self.prefill, self.decode) for each in link.engine(Host.take_errors)]


def items(case: Case, side: str = "target", **changes: Any) -> dict[str, Any]:
    """A request's items of one side, with some changed; ``None`` leaves a component out."""
    usual: Mapping[str, Any] = getattr(case, side)
    merged = {**usual, **changes}
    return {name: value for name, value in merged.items() if value is not None}
