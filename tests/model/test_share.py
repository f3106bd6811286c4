"""`Share` over long lines, in simulated time: the connections together get the line's rate, whatever they carry."""

from __future__ import annotations

import heapq
import itertools
import socket
import sys
from typing import Any

import numpy as np
import pytest

from statelink.backend import Batch, Blocks, Transfer
from statelink.link.prefill._pace import AHEAD
from statelink.tcp._share import MORE, Share
from statelink.tcp._stream import MAX_PACING_RATE, Stream, Waker
from statelink.tcp._streams import FULL, LONG_SECONDS, Senders

MIB = 1 << 20
CONNECTIONS, TRANSFERS = 7, 32
RTT, RATE = 0.1, 125e6


class Line:
    """Carries batches over connections, each of which sends as fast as it may, and then over the line."""

    def __init__(self) -> None:
        self.rate = RATE
        self.share = Share(RTT)
        self.now = 0.0
        self._numbers = itertools.count()
        self._free = 0.0
        self._sent = [0.0] * CONNECTIONS
        """Until when each of them sends what it has."""
        self._waiting = [0] * CONNECTIONS
        self._flying: list[tuple[float, int, int, Transfer]] = []

    def push(self, count: int, every: float = 0.0) -> float:
        """Move so many MiB after a pause. The engine has one of them every so many seconds. Returns how long it took.

        As much is under way as on a real line, and in as many batches.
        """
        self.now = began = self.now + 1.0
        nbytes = max(MIB // 4, int(AHEAD * RTT * self.rate / TRANSFERS))
        most = int(AHEAD * RTT * self.rate / nbytes) + 1
        for number in range(count * MIB // nbytes):
            self.now = max(self.now, began + number * nbytes / MIB * every)
            while len(self._flying) >= most or (self._flying and self._flying[0][0] <= self.now):
                self._land()
            self._submit(nbytes)
        while self._flying:
            self._land()
        return self.now - began

    def _submit(self, nbytes: int) -> None:
        batch = Transfer()
        place = min(range(CONNECTIONS), key=self._waiting.__getitem__)
        self._waiting[place] += 1
        self.share.begins(batch, nbytes, self.now, full=min(self._waiting) >= FULL)
        allowed = self.share.of(CONNECTIONS - self._waiting.count(0))
        sent = self._sent[place] = max(self._sent[place], self.now) + (nbytes / allowed if allowed else 0.0)
        self._free = max(self._free, sent) + nbytes / self.rate
        heapq.heappush(self._flying, (self._free + RTT, next(self._numbers), place, batch))

    def _land(self) -> None:
        ends, _, place, batch = heapq.heappop(self._flying)
        self._waiting[place] -= 1
        self.now = max(self.now, ends)
        batch.succeed()

    @property
    def together(self) -> float:
        """What all connections together may send, as a part of the line's rate."""
        return self.share.of(1) / self.rate


@pytest.fixture
def line() -> Line:
    """One over which three large pushes went."""
    made = Line()
    assert not made.together, "it limits what it does not know"
    for _ in range(3):
        made.push(128)
    return made


def test_they_get_somewhat_more_than_the_line_moves(line: Line) -> None:
    assert line.together == pytest.approx(MORE, rel=0.1)
    assert line.share.of(4) == line.share.of(1) / 4


@pytest.mark.parametrize("count", [3, 8, 16, 20, 24, 40])
def test_short_pushes_do_not_make_it_lower(line: Line, count: int) -> None:
    """Most of their time is the round trip."""
    took = [line.push(count) for _ in range(100)]
    assert line.together > 0.9 * MORE
    assert took[-1] == pytest.approx(took[0], rel=0.05)


def test_a_slow_engine_does_not_make_it_lower(line: Line) -> None:
    line.push(1000, every=4 * MIB / RATE)
    assert line.together > 0.9 * MORE


@pytest.mark.parametrize("times", [0.25, 4.0])
def test_it_follows_a_line_that_becomes_slower_or_faster(line: Line, times: float) -> None:
    line.rate *= times
    for _ in range(8):
        line.push(128)
    assert line.together == pytest.approx(MORE, rel=0.2)


class Connection:
    """One that has answered nothing yet, in place of a `Sender`."""

    transport = "socket"

    def __init__(self, round_trip: float) -> None:
        self.round_trip = round_trip
        self.waiting = 0
        self.rates: list[float] = []

    def submit(self, batch: Batch) -> Transfer:
        self.waiting += 1
        return Transfer()

    def pace(self, rate: float) -> None:
        self.rates.append(rate)

    def want(self) -> None:
        """It is there."""


@pytest.mark.parametrize("round_trip", [LONG_SECONDS, LONG_SECONDS / 2], ids=["long", "short"])
def test_only_what_sends_over_a_long_line_gets_a_share(round_trip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Connection] = []
    monkeypatch.setattr(Share, "of", lambda _, number: 840.0 / number)

    def make(number: int) -> Any:
        made.append(Connection(round_trip))
        return made[-1]

    senders = Senders(make, 8, "decode")
    long, int_ = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    for nbytes in (MIB, *[4 * MIB] * 3):
        senders.submit(Batch(Blocks(long, long, long, int_, int_), 1, 1), nbytes)
    small, *large = made
    assert (small.waiting, sum(each.waiting for each in large)) == (1, 3)
    shares = [[840.0, 420.0, 280.0], [420.0, 280.0], [280.0]] if round_trip >= LONG_SECONDS else []
    assert [each.rates for each in made if each.rates] == shares
    assert not small.rates


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux paces sockets")
def test_the_kernel_knows_the_rate() -> None:
    waker = Waker()
    stream = Stream(sock := socket.socket(), waker, lambda: None)

    def rate() -> int:
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, 8), sys.byteorder)

    unlimited = rate()
    stream.pace(0.0)
    assert rate() == unlimited
    stream.pace(5e9)  # more than four bytes hold
    assert rate() == 5_000_000_000
    stream.pace(5.1e9)
    assert rate() == 5_000_000_000, "each call of the kernel costs time"
    stream.pace(1e6)
    assert rate() == 1_000_000
    stream.close()
    stream.pace(2e6)
    waker.close()
