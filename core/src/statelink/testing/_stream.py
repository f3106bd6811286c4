"""Functions that run in a worker: moves one after the other on a thread, while something happens to the peer."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from statelink.backend import Batch, Outcome, Transfer
from statelink.errors import StatelinkError

from ._inside import pieces
from ._worker import REST, Hung, Unexpected, outcome_of, unexpected

if TYPE_CHECKING:
    from ._inside import Move
    from ._worker import Host, Opened

__all__ = ["Left"]


class Left(NamedTuple):
    """The progress of a stream.

    Attributes:
        outcomes: Outcomes of the transfers that have ended.
        refused: Why ``submit`` refused to start another, if it did.
        ended: Whether no transfer is under way.
    """

    outcomes: list[Outcome]
    refused: str
    ended: bool


class Stream:
    """Repeats a move, like a data thread of the core, until it fails or is stopped.

    Args:
        opened: The backend.
        each: The move.
    """

    def __init__(self, opened: Opened, each: Move) -> None:
        self.stop = threading.Event()
        self.outcomes: list[Outcome] = []
        self.refused = ""
        self.failure: BaseException | None = None
        self._ended: list[Transfer] = []
        self._opened = opened
        self._each = each
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._move()
        except StatelinkError as error:  # by the contract, no byte of the batch was or will be moved
            self.refused = str(error)
        except BaseException as error:
            self.failure = error

    def _move(self) -> None:
        opened, each = self._opened, self._each
        limits = opened.backend.capabilities
        running: list[Transfer] = []
        try:
            for piece in itertools.cycle(list(pieces(each.blocks, limits))):
                while len(running) >= limits.max_transfers:
                    self._look(running)
                if self.stop.is_set() or not all(outcome.ok for outcome in self.outcomes):
                    return
                running.append(opened.submit(each.peer, Batch(each.op, piece, each.room, each.generation)))
        finally:
            while running:
                self._look(running)

    def _look(self, running: list[Transfer]) -> None:
        with self._opened.turn:
            self._opened.backend.poll([transfer for transfer in running if transfer.outcome is None])
        left = [transfer for transfer in running if transfer.outcome is None]
        ended = [transfer for transfer in running if transfer not in left]
        self.outcomes += [outcome_of(transfer) for transfer in ended]
        self._ended += [transfer for transfer in ended if not outcome_of(transfer).ok]
        running[:] = left
        if running:
            time.sleep(REST)

    def settle(self, patience: float) -> None:
        """Poll the transfers that failed until all have stopped, for so many seconds at most. The stream has ended."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            unsettled = [transfer for transfer in self._ended if outcome_of(transfer).unsettled]
            if not unsettled:
                return
            with self._opened.turn:
                self._opened.backend.poll(unsettled)
            time.sleep(REST)


def start(host: Host, each: Move) -> None:
    """Let a stream begin."""
    host.kept["stream"] = Stream(host.backends[each.link], each)


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
        stream.stop.set()
    stream.thread.join(patience)
    ended = not stream.thread.is_alive()
    if must and not ended:
        raise Hung(f"a transfer did not end within {patience:g} s")
    if stream.failure is not None:
        raise stream.failure if isinstance(stream.failure, Unexpected) else unexpected(stream.failure)
    return Left(list(stream.outcomes), stream.refused, ended)


def settle(host: Host, patience: float) -> None:
    """Wait until nothing of the stream, which has ended, can land any more; for so many seconds at most."""
    stream: Stream = host.kept["stream"]
    stream.settle(patience)
