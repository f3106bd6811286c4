"""Batches to one peer: how they are submitted, and how large the next is, from how much the peer was seen to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from statelink.backend import Backend, Batch, Blocks, Transfer
from statelink.errors import StatelinkError
from statelink.link._reasons import BackendDefect

__all__ = ["QUEUE_SECONDS", "Began", "Pace", "submit_together"]

QUEUE_SECONDS = 3e-3
"""For so long, what comes later may wait in the library for what is under way."""
ALONE = 3
"""So many times as long a batch takes where only one transfer is under way at a time, since it ends before the next one
begins. On a long line, it is so many times the least latency."""
LEAST_BYTES = 256 << 10
"""Least bytes of a batch."""
FIRST_BYTES = 1 << 20
"""Bytes of a batch as long as nothing is known of the peer."""
FIRST_WINDOW = 16 << 20
"""Bytes that are under way as long as nothing is known of the peer: a line of 1 Gbit/s and 100 ms holds 12."""
MOST_BYTES = 256 << 20
"""Most bytes that are under way: 300 ms of 7 Gbit/s."""
AHEAD = 1.5
"""So many times as much as a line holds is under way, so that the library always has something to send."""
BATCHES = 2
"""Batches that are under way at least: while one moves, the next one waits in the library."""
MOST_BATCHES = 16
"""Batches that are under way at most, where threads are late."""
FORGIVEN = 63 / 64
"""How much of the additional batches is left after one that was not late."""
MEMORY = 7 / 8
"""How much the rate so far counts beside one more batch."""
WITNESSES = 8
"""Only so many transfers with nothing before them can show that a line has become longer. A connection may be slow now
and then."""


class Began(NamedTuple):
    """What was there when a transfer began.

    Attributes:
        ended: Bytes of transfers that had ended.
        alone: Whether no other one was under way.
    """

    ended: int
    alone: bool


class Pace:
    """Says how large the next batch to a peer may be, and whether it may go. Belongs to the jobs with the peer's key.

    A batch is what the peer takes in `QUEUE_SECONDS`, or in half of that where a second one may be under way meanwhile.
    More batches are under way after the library had nothing left to do while more waited here: then a thread of this
    process or of the peer's is late now and then, as beside an engine that computes.

    On a long line, far more must be under way: `AHEAD` times what was moved in the least time that a transfer takes,
    which is the time of one with nothing before it. So the window grows until the library never runs dry, and no
    further: transfers that wait in the library take longer, and show no higher rate.

    A transfer that ends inside ``submit`` was never under way.

    Args:
        most: Most bytes of a batch.
        transfers: Most transfers that are under way.

    Attributes:
        batch_bytes: Bytes of the next batch.
    """

    def __init__(self, most: int, transfers: int) -> None:
        self._most = most
        self._transfers = transfers
        self._reserved = 1 if transfers > BATCHES else 0
        """Transfers that are kept free for small pushes."""
        self.batch_bytes = min(FIRST_BYTES, most)
        self._batches = float(BATCHES)
        self._line = FIRST_WINDOW if transfers > 1 else 0
        """Bytes that may be under way on a long line."""
        self._window = 0
        """Bytes that may be under way."""
        self._set_window()
        self._flying = 0
        self._flights = 0
        self._ended = 0
        """Bytes of transfers that have ended."""
        self._bytes = self._seconds = 0.0
        """Bytes that were moved, and how long that took. Earlier ones count less."""
        self._last = 0.0
        """When a transfer last ended."""
        self._least = math.inf
        """The least latency of the last transfers, in seconds."""
        self._coming, self._witnesses = math.inf, 0
        """The least latency of the last transfers with nothing before them, and how many they are."""

    def piece(self, left: int) -> int:
        """How many of the bytes that are left of something the next batch may have. A small rest is not cut off."""
        return left if left <= min(2 * self.batch_bytes, self._most) else self.batch_bytes

    def admits(self) -> bool:
        """Whether the next batch of a large push may go."""
        return not self._flights or (self._flying < self._window and self._flights < self._transfers - self._reserved)

    def admits_small(self) -> bool:
        """Whether a small push may go, beside what others have under way."""
        return self._flights < self._transfers and self._flying < 2 * self._window

    def busy_seconds(self, nbytes: int) -> float:
        """For how long the library is busy with what is under way, but for so many bytes; 0 where it is not known."""
        left = self._flying - nbytes
        return left * self._seconds / self._bytes if left > 0 and self._bytes > 0 else 0.0

    def began(self, nbytes: int) -> Began:
        """A transfer is under way."""
        begins = Began(self._ended, not self._flights)
        self._flying += nbytes
        self._flights += 1
        return begins

    def forgotten(self, nbytes: int) -> None:
        """Nobody looks at a transfer any more that was under way."""
        self._flying -= nbytes
        self._flights -= 1

    def ended_at_once(self, nbytes: int, since: float, now: float) -> None:
        """A transfer has ended inside ``submit``."""
        self._note(now - since, alone=False)  # a full batch takes longer than the line
        self._measure(nbytes, now - max(since, self._last))
        self._last = now
        self._cut()

    def ended(self, flights: Sequence[tuple[int, float, Began]], now: float, *, waited: bool) -> None:
        """Transfers have ended that were under way.

        Args:
            flights: The bytes of each, when it was submitted, and what `began` gave for it.
            now: When that was seen.
            waited: Whether more could have been under way.
        """
        total = sum(nbytes for nbytes, _, _ in flights)
        first = min(since for _, since, _ in flights)
        if first <= self._last or self._least <= QUEUE_SECONDS:  # else most of the time is the line's, not the bytes'
            self._measure(total, now - max(first, self._last))
        self._last = now
        self._ended += total
        for nbytes, since, begins in flights:
            self._flying -= nbytes
            self._flights -= 1
            self._note(now - since, alone=begins.alone)
            self._batches = max(self._batches * FORGIVEN, BATCHES)
            self._fill(nbytes, self._ended - begins.ended, now - since, waited=waited)
        self._cut()

    def _fill(self, nbytes: int, moved: int, latency: float, *, waited: bool) -> None:
        """Let as much be under way as fills the line, after a transfer, in whose time so much was moved."""
        found = min(int(AHEAD * moved * self._least / latency), MOST_BYTES) if latency > 0 else 0
        if found > self._line:
            self._line = found
        elif waited:  # else there was not more to move
            self._line -= int((self._line - found) * min(1.0, nbytes / max(1, AHEAD * self._line)))

    def ran_dry(self) -> None:
        """Nothing is under way any more, although more could have been."""
        self._batches = min(2 * self._batches, MOST_BATCHES)
        self._set_window()

    def _measure(self, nbytes: int, took: float) -> None:
        """Note how fast bytes were moved. A small batch shows no more than the least rate."""
        if nbytes >= self.batch_bytes or nbytes * self._seconds > self._bytes * took:
            self._bytes = MEMORY * self._bytes + nbytes
            self._seconds = MEMORY * self._seconds + took

    def _note(self, latency: float, *, alone: bool) -> None:
        """Note how long a transfer took. One that waited for others cannot show that the line has become longer."""
        if alone:
            self._coming = min(self._coming, latency)
            self._witnesses += 1
            if self._witnesses == WITNESSES:
                self._least, self._coming, self._witnesses = self._coming, math.inf, 0
        self._least = min(self._least, latency)

    def _cut(self) -> None:
        """Set the bytes of a batch to those of `QUEUE_SECONDS`."""
        seconds = QUEUE_SECONDS
        if self._transfers == 1:
            seconds = ALONE * (max(seconds, self._least) if self._least < math.inf else seconds)
        nbytes = int(self._bytes / self._seconds * seconds) if self._seconds > 0 else FIRST_BYTES
        self.batch_bytes = min(max(nbytes, LEAST_BYTES, self._line // self._transfers), self._most)
        self._set_window()

    def _set_window(self) -> None:
        self._window = max(int(self._batches * self.batch_bytes), self._line)


def submitted(backend: Backend, peer: str, batch: Batch) -> Transfer | BaseException:
    """Submit a batch to a peer. Blocks as the backend's ``submit`` does.

    Returns:
        Its transfer; or what ``submit`` raised, which is a `BackendDefect` unless the contract allows it.
    """
    try:
        made: object = backend.submit(peer, batch)
    except StatelinkError as error:
        return error  # by contract, nothing of the batch was or will be moved
    except BaseException as error:
        defect = BackendDefect()
        defect.__cause__ = error
        return defect
    if isinstance(made, Transfer):
        return made
    return BackendDefect.returned(backend, "`submit` returned", made, "a Transfer")


def submit_together(backend: Backend, peer: str, batches: Sequence[Batch]) -> list[Transfer | BaseException]:
    """Submit batches to a peer. Several go as one. Blocks as the backend's ``submit`` does.

    If the backend refuses them as one, they are submitted one by one, so that a bad one fails alone.

    Args:
        backend: The backend.
        peer: Link name of the destination.
        batches: Writes, all of which were checked against the same tables. If the backend does not declare
            ``joins_rooms``, at most one.

    Returns:
        For each batch what `submitted` returns. Batches may share a transfer.
    """
    if len(batches) > 1:
        blocks = Blocks.concatenate([each.blocks for each in batches])
        answer = submitted(backend, peer, Batch(blocks, 0, 0, batches[0].checked))
        if not isinstance(answer, StatelinkError):
            return [answer] * len(batches)
    return [submitted(backend, peer, each) for each in batches]
