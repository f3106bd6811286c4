"""Functions that run in a worker: moves one after the other on a thread, while something happens to the peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from statelink.backend import Batch, Side
from statelink.errors import StatelinkError

from ._worker import REST_SECONDS, Finding, Hung, Unexpected, outcome_of, unexpected

if TYPE_CHECKING:
    from statelink.backend import Outcome, Transfer

    from ._inside import Move
    from ._worker import Host, Opened

__all__ = ["Left"]


class Left(NamedTuple):
    """The progress of a stream.

    Attributes:
        failed: Outcomes of the transfers that have failed.
        refused: Why ``submit`` refused to start another, if it did.
        ended: Whether no transfer is under way.
        settled: For each move: the sides at which everything that was submitted of it is said to have stopped.
    """

    failed: list[Outcome]
    refused: str
    ended: bool
    settled: list[frozenset[Side]]


class Stream:
    """Makes moves in turn, like a data thread of the core, until one fails or it is stopped.

    No move begins again before it has ended, so that of each one it is known what may touch its memory.

    Args:
        opened: The backend.
        moves: What is moved, in a batch each. No two of them have bytes in common.
    """

    def __init__(self, opened: Opened, moves: Sequence[Move]) -> None:
        self.refused = ""
        self.failure: BaseException | None = None
        self._opened = opened
        self._moves = moves
        self._stop = False
        self._lock = threading.Lock()
        self._busy: dict[int, Transfer | None] = {}  # by the number of the move; ``None`` while it is submitted
        self._failed: list[tuple[int, Transfer]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._move()
        except BaseException as error:
            self.failure = error

    def _move(self) -> None:
        most, number = self._opened.backend.capabilities.max_transfers, -1
        while not self.refused:
            number = self._next(number)
            if number < 0:
                break
            self._submit(number)
            while len(self._busy) >= most:
                self._look()
        while self._busy:
            self._look()

    def _next(self, last: int) -> int:
        """The number of the move to begin, which is busy from now on; -1 for none."""
        with self._lock:
            if self._stop or self._failed:
                return -1
            count = len(self._moves)
            number = next(each % count for each in range(last + 1, last + 1 + count) if each % count not in self._busy)
            self._busy[number] = None
            return number

    def _submit(self, number: int) -> None:
        each = self._moves[number]
        try:
            made = self._opened.submit(each.peer, Batch(each.blocks, each.room, each.generation))
        except StatelinkError as error:  # by the contract, no byte of the batch was or will be moved
            self.refused = str(error)
            with self._lock:
                del self._busy[number]
            return
        with self._lock:
            self._busy[number] = made

    def _look(self) -> None:
        """Poll what is under way, and take notice of what has ended."""
        running = {number: transfer for number, transfer in self._busy.items() if transfer is not None}
        with self._opened.turn:
            self._opened.backend.poll([each for each in running.values() if each.outcome is None])
        ended = {number: transfer for number, transfer in running.items() if transfer.outcome is not None}
        with self._lock:
            for number, transfer in ended.items():
                if not outcome_of(transfer).ok:
                    self._failed.append((number, transfer))
                del self._busy[number]
        if self._busy:
            time.sleep(REST_SECONDS)

    def stop(self) -> None:
        """Begin no more moves."""
        with self._lock:
            self._stop = True

    def left(self) -> Left:
        """What there is to say now."""
        with self._lock:
            failed = [(number, outcome_of(transfer)) for number, transfer in self._failed]
            settled = [
                frozenset[Side]() if number in self._busy else frozenset(Side) for number in range(len(self._moves))
            ]
        for number, outcome in failed:
            settled[number] -= outcome.unsettled
        return Left([outcome for _, outcome in failed], self.refused, not self.thread.is_alive(), settled)

    def settle(self, patience: float) -> None:
        """Poll the transfers that failed until all have stopped, for so many seconds at most."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            with self._lock:
                failed = [transfer for _, transfer in self._failed]
            unsettled = [transfer for transfer in failed if outcome_of(transfer).unsettled]
            if not (unsettled or self.thread.is_alive()):
                return
            if unsettled:
                with self._opened.turn:
                    self._opened.backend.poll(unsettled)
            time.sleep(REST_SECONDS)


def start(host: Host, moves: Sequence[Move]) -> None:
    """Let a stream begin."""
    host.kept["stream"] = Stream(host.backends[moves[0].link], moves)


def look(host: Host, patience: float, stop: bool = False, must: bool = False) -> Left:
    """The progress of the stream after some seconds, or at once if it has ended.

    Args:
        host: This process.
        patience: Number of seconds.
        stop: Whether to start no more transfers.
        must: Whether the stream must have ended by then.
    """
    stream: Stream = host.kept["stream"]
    if stop:
        stream.stop()
    stream.thread.join(patience)
    left = stream.left()
    if must and not left.ended:
        raise Hung(f"a transfer did not end within {patience:g} s")
    if stream.failure is not None:
        known = isinstance(stream.failure, Unexpected | Finding)
        raise stream.failure if known else unexpected(stream.failure)
    return left


def settle(host: Host, patience: float) -> None:
    """Poll until nothing of the stream that has failed can land any more; for so many seconds at most."""
    stream: Stream = host.kept["stream"]
    stream.settle(patience)
