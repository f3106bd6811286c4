"""What may still read this side's memory for a destination, or write to the destination's.

A push is a job on data threads, and a job submits transfers to the backend. Each is in flight until one of these holds:

- its job has ended, and each of its transfers succeeded, or failed and is *settled*;
- a transfer that the job left behind has ended in one of these ways;
- a *stray*, a transfer that failed and was not settled, is settled later by the backend;
- the process of the destination has ended: nothing of it can be written to any more, and nobody gets the bytes.

Nothing else counts: no time that has passed, and no silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from statelink.backend import Side

if TYPE_CHECKING:
    from statelink.backend import Transfer
    from statelink.link.runtime import Loop, Workers

    from ._decode_ranks import DecodeRank
    from ._push import Moving

__all__ = ["OutgoingInFlight", "RequestId", "UsesInFlight"]

POLL_RUNNING, POLL_STRAYS, POLL_BROKEN = 0.01, 0.25, 1.0
"""Seconds between two polls of transfers that a failed room left behind: of running ones, of strays, and of running
ones after ``poll`` raised."""

RequestId = tuple[str, int, int]
"""One request of one decode rank: its link name, the room and the generation."""


class OutgoingInFlight:
    """What of one delivery is in flight. Belongs to the control thread.

    Args:
        loop: The control thread's loop.
        workers: The data threads, which poll the backend.
        rank: The destination.

    Attributes:
        jobs: Jobs of pushes whose results have not come back, and polls that are under way.
        unsettled: Per side, why it is not certain that the bytes of a failed transfer have stopped.
    """

    def __init__(self, loop: Loop, workers: Workers, rank: DecodeRank) -> None:
        self.jobs = 0
        self.unsettled: dict[Side, str] = {}
        self._loop = loop
        self._workers = workers
        self._rank = rank
        self._running: list[Transfer] = []
        """Transfers that a cancelled job left running."""
        self._strays: list[Transfer] = []
        """Transfers that failed and are not settled. The backend may settle them later."""
        self._polls_running = False
        self._polls_strays = False
        self._exited = False
        """Whether the destination's process has ended. Then nothing counts as in flight to it."""
        self._unknown = False
        """Whether ``submit`` raised what it must not, so that it is not known what became of a batch."""

    def on(self, side: Side) -> bool:
        """Whether a transfer may still read this side's memory (`Side.SOURCE`), or write to the destination's."""
        return self.running or (bool(self.unsettled) and not self._exited and side in self.unsettled)

    @property
    def running(self) -> bool:
        """Whether a job or a transfer is under way whose end this side will see."""
        return bool(self.jobs or (self._running and not self._exited))

    @property
    def unproven(self) -> bool:
        """Whether a failed write may land in the destination's memory, and nobody knows when it has."""
        return not self._exited and Side.TARGET in self.unsettled

    def moved(self, moving: Moving) -> None:
        """The job of a push has ended."""
        self.jobs -= 1
        if moving.pending:
            self._running.extend(moving.pending)
        if moving.unsettled:
            self._unknown = True
            self._unsettle(moving.unsettled, moving.reason.cause if moving.reason is not None else "")
        for transfer in moving.strays:
            self._keep_stray(transfer)

    def find_exit(self) -> bool:
        """If anything is in flight, look whether the destination's process has ended. Returns whether that is new."""
        if self._exited or not self.on(Side.SOURCE) or not self._rank.exited:
            return False
        self._exited = True
        return True

    def look_after(self, then: Callable[[], None]) -> None:
        """Poll the transfers that failed or cancelled pushes left behind, unless a poll is under way.

        Args:
            then: Called on the control thread once some transfers have ended, and when it is time to call this again.
        """
        if self._running and not self.jobs and not self._exited:
            # One poll at a time, and one pause: each end of a pause calls this for every destination of the room.
            if not self._polls_running:
                self._polls_running = True
                self._poll_running(then)
        elif self._strays and not self._polls_strays:
            self._polls_strays = True
            self._poll_strays(then)

    def _poll_running(self, then: Callable[[], None]) -> None:
        transfers = list(self._running)
        self.jobs += 1

        # Runs on the control thread, after a data thread has polled.
        def done(polled: bool) -> None:
            self.jobs -= 1
            self._running = [each for each in transfers if each.outcome is None]
            for each in set(transfers).difference(self._running):
                self._keep_stray(each)
            if self._running:
                self._loop.after(POLL_RUNNING if polled else POLL_BROKEN, again)
            else:
                again()

        def again() -> None:
            self._polls_running = False
            then()

        running = [each for each in transfers if each.outcome is None]
        self._workers.poll(("running", self._rank.name), running, done)

    def _poll_strays(self, then: Callable[[], None]) -> None:
        # Runs on the control thread, after a data thread has polled.
        def done(_: bool) -> None:
            self._strays = [each for each in self._strays if each.outcome is not None and each.outcome.unsettled]
            if self._strays:
                self._loop.after(POLL_STRAYS, partial(self._poll_strays, then))
                return
            self._polls_strays = False
            if not self._unknown:
                self.unsettled.clear()
            then()

        self._workers.poll(("strays", self._rank.name), list(self._strays), done)

    def _keep_stray(self, transfer: Transfer) -> None:
        """A transfer has ended: if it is not settled, keep it, since the backend may settle it later."""
        outcome = transfer.outcome
        if outcome is not None and outcome.unsettled:
            self._strays.append(transfer)
            self._unsettle(outcome.unsettled, outcome.reason)

    def _unsettle(self, sides: frozenset[Side], why: str) -> None:
        for side in sides:
            self.unsettled.setdefault(side, why or "the backend does not say why")


class UsesInFlight(set[RequestId]):
    """Uses of decode ranks to which transfers failed without being settled. Belongs to the control thread.

    A use stays here when its room is forgotten: as long as it is here, it must not be called drained. The set has no
    bound of its own. Each use in it keeps memory of its destination quarantined, so there cannot be many.
    """

    def destinations(self) -> set[str]:
        """Link names of the ranks to which such writes may be in flight."""
        return {name for name, _, _ in self}
