"""`Pace` over lines of any length, in simulated time: they are full, and little waits in front of them."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import pytest

from statelink.link.prefill._pace import Began, Pace

MIB = 1 << 20
TRANSFERS = 32


class Flight(NamedTuple):
    """A transfer. The first to end is the least."""

    ends: float
    number: int
    nbytes: int
    since: float
    began: Began


class Line:
    """Moves bytes at a rate, one transfer after the other, and tells of each end a round trip later."""

    def __init__(self, rtt: float, rate: float) -> None:
        self.pace = Pace(64 * MIB, TRANSFERS)
        self.now = 100.0
        self._rtt, self._rate = rtt, rate
        self._free = 0.0
        self._flights: list[Flight] = []
        self._numbers = 0
        self.most = 0
        """The most bytes that were under way."""

    def room(self, nbytes: int) -> float:
        """Move so many bytes after a pause; the seconds."""
        self.now = began = self.now + 1.0
        while nbytes or self._flights:
            while nbytes and self.pace.admits():
                nbytes -= self._submit(self.pace.piece(nbytes))
            self._land(waited=nbytes > 0)
        return self.now - began

    def _submit(self, nbytes: int) -> int:
        self._free = max(self._free, self.now) + nbytes / self._rate
        self._numbers += 1
        flight = Flight(self._free + self._rtt, self._numbers, nbytes, self.now, self.pace.began(nbytes))
        heapq.heappush(self._flights, flight)
        self.most = max(self.most, sum(each.nbytes for each in self._flights))
        return nbytes

    def _land(self, *, waited: bool) -> None:
        flight = heapq.heappop(self._flights)
        self.now = flight.ends
        self.pace.ended([(flight.nbytes, flight.since, flight.began)], self.now, waited=waited)
        if waited and not self._flights:
            self.pace.ran_dry()


LINES = [(rtt, rate) for rtt in (50e-6, 1e-3, 30e-3, 0.1, 0.3) for rate in (12.5e6, 125e6, 1.25e9)][:-1]
"""Seconds, and bytes in a second. The last line would hold more than may be under way."""


@pytest.mark.parametrize(("rtt", "rate"), LINES)
def test_a_line_is_full(rtt: float, rate: float) -> None:
    line = Line(rtt, rate)
    for nbytes in (MIB, 8 * MIB, 8 * MIB, 1024 * MIB, 8 * MIB, 1024 * MIB):
        took = line.room(nbytes)
    assert took <= 1.05 * (1024 * MIB / rate + rtt)


@pytest.mark.parametrize(("rtt", "rate"), LINES)
def test_what_waits_in_front_of_a_line_is_bounded(rtt: float, rate: float) -> None:
    """However long one request follows another."""
    line = Line(rtt, rate)
    for _ in range(5):
        line.room(256 * MIB)
        line.most = 0
    line.room(4096 * MIB)
    assert line.most <= 2.5 * rtt * rate + max(4 * MIB, 20e-3 * rate)


@pytest.mark.parametrize(("rtt", "rate"), [(rtt, rate) for rtt, rate in LINES if rate < 1e9])
def test_one_transfer_at_a_time_fills_most_of_a_line(rtt: float, rate: float) -> None:
    pace, now, left = Pace(64 * MIB, 1), 100.0, 1024 * MIB
    while left:
        nbytes, since = pace.piece(left), now
        now += rtt + nbytes / rate
        pace.ended_at_once(nbytes, since, now)
        left -= nbytes
    assert now - 100.0 <= 2 * 1024 * MIB / rate


@pytest.mark.parametrize("nbytes", [8 * MIB, 16 * MIB])
def test_a_first_request_is_under_way_at_once(nbytes: int) -> None:
    line = Line(0.1, 125e6)
    assert line.room(nbytes) == pytest.approx(nbytes / 125e6 + 0.1)
