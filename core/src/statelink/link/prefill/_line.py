"""The pushes to one decode rank: whose batch goes next, and how much is under way in the library."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from statelink.backend import Batch, SubmitMode, Transfer

from ._pace import QUEUE_SECONDS, Began, Pace, submit_together
from ._push import Until, Waiting

if TYPE_CHECKING:
    from statelink.link._context import Context

    from ._push import Push, Pushes, Then

__all__ = ["Line"]

MOST_PROMPT_BLOCKS = 4096
"""Most blocks of a push that the control thread itself lists and submits, where the backend never blocks: one or two
milliseconds of work. This saves a small request two changes of threads."""
JOINT_BYTES = 2 << 20
"""Most bytes of pushes that are submitted together: less than a millisecond of copying."""
JOINT_BLOCKS = 500
"""Most blocks of pushes that are submitted together. With more, numpy lets go of the interpreter."""
TURN_SECONDS = 1e-3
"""After so long, a job ends and submits the next one, so that the jobs of other peers have their turn."""
FIRST_NAP, NAP, LONGEST_NAP = 20e-6, 1e-3, 0.05
"""Seconds between two polls of running transfers. They begin with the first number and double up to the second. After
that they grow with the time that went by, up to the third, so that many stalled peers cost little."""
NAP_SHARE = 1 / 64
"""How long such a nap may be, as a fraction of the time in which no transfer has ended."""
BUSY_SHARE = 1 / 2
"""How long a nap is at least, as a fraction of the time for which the library is busy after the first transfer. As long
as it is, nothing is lost if the end of that transfer is seen late."""


class Flight:
    """A transfer that has not ended.

    Attributes:
        transfer: The transfer.
        lists: The deliveries whose blocks it has. Those that have ended were taken out.
        nbytes: Its bytes.
        since: When it was submitted.
        began: What `Pace.began` gave for it.
    """

    __slots__ = ("began", "lists", "nbytes", "since", "transfer")

    began: Began

    def __init__(self, transfer: Transfer, lists: list[Pushes], nbytes: int, since: float) -> None:
        self.transfer = transfer
        self.lists = lists
        self.nbytes = nbytes
        self.since = since


class Line:
    """Lets the pushes to one decode rank take turns.

    Small pushes, which are one batch, go first. So they do not wait for large ones. These follow in turn, a batch each.
    A stream of small pushes does not hold them up: it is never more than one batch ahead. `Pace` says how large a batch
    is, and how much may be under way at once. What the library has cannot be overtaken.

    A call into a library may cost more than the bytes of a small room: each return from it waits for the interpreter,
    up to 5 ms while the engine's thread computes. So small pushes that wait together go as one batch, if the backend
    allows it with ``Capabilities.joins_rooms``. Then they also wait until the control thread has handled what came
    before them.

    The control thread adds pushes. All else is done by jobs with the peer's key, of which one runs at a time: on a data
    thread, or on the control thread while every push is small and no call for it blocks.

    Args:
        context: The link's parts.
        peer: Link name of the decode rank.

    Attributes:
        pace: How large a batch is, and how much may be under way. The jobs use it.
    """

    def __init__(self, context: Context, peer: str) -> None:
        backend, limits = context.backend, context.backend.capabilities
        self._context = context
        self._backend = backend
        self._now = context.now
        self._peer = peer
        self._key = "peer", peer
        """The key of its jobs."""
        self.pace = Pace(min(limits.max_bytes, context.config.slice_bytes), limits.max_transfers)
        self._never_blocks = limits.submit_mode is SubmitMode.ASYNC and limits.ends_unpolled
        self._unpolled = limits.ends_unpolled
        self._joins = limits.joins_rooms
        self._most_blocks = limits.max_blocks
        self._joint_blocks = min(JOINT_BLOCKS, limits.max_blocks)
        self._joint_bytes = min(
            limits.prompt_bytes or JOINT_BYTES, JOINT_BYTES, limits.max_bytes, context.config.slice_bytes
        )
        # Any thread appends to these, and the job takes out. Nobody may iterate over them.
        self._came: deque[Pushes] = deque()
        """Deliveries that have another push, that were woken, or that were cancelled."""
        self._landed: deque[Flight] = deque()
        """Flights that have ended."""
        self._called = False
        """Whether a job was asked for that has not begun. Any thread; see `_call`."""
        self._slow = 0
        """Pushes so far that the control thread must not carry. The control thread counts them."""
        self._slow_ended = 0
        """How many of them have ended. The job counts them."""
        # The job alone uses these.
        self._small: deque[Pushes] = deque()
        """Whose next push is small, and has not begun; the first to come first."""
        self._turns: deque[Pushes] = deque()
        """Whose next push is large, or asks for another batch. The first one's turn is next."""
        self._ahead = 0
        """Bytes that small pushes have had since the last turn of the others."""
        self._flights: dict[Flight, None] = {}
        self._nap_number, self._nap_until = 0, math.inf
        """The next poll: its number, and when it is due."""
        self._progress = 0.0
        """When a batch was last submitted, or a flight ended."""
        self._nap = FIRST_NAP

    # Any thread.

    def wake(self, pushes: Pushes) -> None:
        """The strategy of pushes has more. Any thread."""
        self._came.append(pushes)
        self._call()

    def _call(self) -> None:
        """Have a job look at what came. Any thread.

        Whoever adds something does so before this reads `_called`. The job clears `_called` before it looks. So either
        the job that was asked for sees it, or this asks for another one.
        """
        if not self._called:
            self._called = True
            if self._at_once:
                self._context.post_job(self._go_here)
            else:
                self._context.workers.moves.submit_job(self._key, self._go)

    @property
    def _at_once(self) -> bool:
        """Whether the control thread may run the jobs. Any thread."""
        return self._slow == self._slow_ended

    # Control thread.

    def add_push(self, pushes: Pushes, push: Push, then: Then, blocks: int, nbytes: int) -> None:
        """Move a push after those of its delivery before it. Control thread.

        Args:
            pushes: Those of its delivery.
            push: The push.
            then: Called on the control thread with the result.
            blocks: Most blocks that it becomes.
            nbytes: Most bytes that it has.
        """
        quick = pushes.prompt and blocks <= MOST_PROMPT_BLOCKS
        if quick and not self._never_blocks:
            limit = self._backend.capabilities.prompt_bytes
            quick = limit > 0 and nbytes <= min(limit, self._backend.prompt_bytes_to(self._peer))
        self._slow += not quick
        pushes.waiting.append(Waiting(push, then, blocks, nbytes, quick))
        self._came.append(pushes)
        if self._called:
            return
        if self._at_once and not (self._joins and self._joinable(blocks, nbytes)):
            self._called = True
            self._go_here()
        else:
            self._call()

    def _go_here(self) -> None:
        """Run a job on this thread, if nothing stands before it. Control thread."""
        moves = self._context.workers.moves
        if self._at_once:
            moves.submit_promptly(self._key, self._go, alone=not self._never_blocks)
        else:
            moves.submit_job(self._key, self._go)

    # Jobs with the peer's key.

    def end(self, pushes: Pushes) -> None:
        """Let pushes that were cancelled be reported. A job with the peer's key.

        Once this returns, their hooks are not called any more for them.
        """
        self._notice(pushes)
        self._call()  # what it left free may be used by others

    def _go(self) -> None:
        """Look at what came and at what has ended, and submit what may go."""
        self._called = False
        began = self._now()
        if self._flights and not self._unpolled:
            self._poll()
        while True:
            self._look()
            if not self._submit_next():
                break
            if not self._never_blocks and self._now() - began > TURN_SECONDS:
                self._call()
                return
        if self._came or self._landed:
            self._call()
        elif self._flights and not self._unpolled:
            self._sleep()

    def _sleep(self) -> None:
        """Poll after a nap, unless another poll is due before that."""
        first = next(iter(self._flights)).nbytes
        nap = max(self._nap, min(BUSY_SHARE * self.pace.busy_seconds(first), QUEUE_SECONDS))
        until = self._now() + nap
        if until < self._nap_until:
            self._nap_until = until
            self._nap_number += 1
            wake_up = partial(self._wake_up, self._nap_number)
            self._context.workers.moves.submit_after(self._key, wake_up, nap)

    def _wake_up(self, number: int) -> None:
        """Poll, after a nap. A job with the peer's key."""
        if number != self._nap_number:
            return  # another poll is due earlier
        self._nap_until = math.inf
        self._nap = min(2 * self._nap, max(NAP, NAP_SHARE * (self._now() - self._progress)), LONGEST_NAP)
        self._go()

    def _look(self) -> None:
        """Let those go on that were waited for."""
        if self._landed:
            self._land()
        while self._came:
            self._notice(self._came.popleft())

    def _notice(self, pushes: Pushes) -> None:
        """There is another push of a delivery, or it was woken or cancelled."""
        asks = pushes.asks
        if pushes.cancelled.raised:
            self._remove(pushes)
            while pushes.waiting:
                self._step(pushes)
        elif asks is Until.WOKEN:
            self._step(pushes)
        elif asks is None:
            self._queue(pushes)

    def _queue(self, pushes: Pushes) -> None:
        """Let the next push of a delivery wait for its turn."""
        if pushes.waiting and not pushes.queued and not pushes.cancelled.raised:
            pushes.queued = True
            following = pushes.waiting[0]
            small = following.nbytes <= self.pace.batch_bytes and following.blocks <= self._most_blocks
            (self._small if small else self._turns).append(pushes)

    def _remove(self, pushes: Pushes) -> None:
        """Take the pushes of a delivery out of the queues."""
        for queue in (self._small, self._turns):
            if pushes in queue:
                queue.remove(pushes)
        pushes.queued = False

    def _step(self, pushes: Pushes, answer: Transfer | BaseException | None = None) -> None:
        """Let the pushes of a delivery go on, until they wait for something."""
        quick = pushes.waiting[0].quick
        asks = pushes.step(answer)
        while asks is Until.ENDED and not pushes.flights and not pushes.cancelled.raised:
            asks = pushes.step()
        self._place(pushes, asks, quick=quick)

    def _place(self, pushes: Pushes, asks: Batch | Until | None, *, quick: bool) -> None:
        """Put the pushes of a delivery where they wait for what they ask for."""
        pushes.asks = asks
        if asks is None:
            self._slow_ended += not quick
            if pushes.flights:
                self._forget(pushes)
            self._queue(pushes)
        elif isinstance(asks, Batch):
            pushes.queued = True
            self._turns.append(pushes)

    # What ends.

    def _poll(self) -> None:
        flights = list(self._flights)
        try:
            self._backend.poll([flight.transfer for flight in flights if flight.transfer.outcome is None])
        except BaseException as error:
            for pushes in dict.fromkeys(pushes for flight in flights for pushes in flight.lists):
                self._remove(pushes)
                if pushes.waiting:
                    self._step(pushes, error)
            return
        self._landed += [flight for flight in flights if flight.transfer.outcome is not None]

    def _land(self) -> None:
        """Flights have ended."""
        landed: list[Flight] = []
        while self._landed:
            flight = self._landed.popleft()
            if flight in self._flights:  # if not, it was forgotten
                del self._flights[flight]
                landed.append(flight)
        if not landed:
            return
        now = self._progress = self._now()
        self._nap = FIRST_NAP
        waited = bool(self._turns)
        self.pace.ended([(flight.nbytes, flight.since, flight.began) for flight in landed], now, waited=waited)
        if waited and not self._flights:
            self.pace.ran_dry()
        for flight in landed:
            failed = not getattr(flight.transfer.outcome, "ok", False)
            for pushes in flight.lists:
                pushes.flights -= 1
                if pushes.asks is Until.ENDED and (failed or not pushes.flights):
                    self._step(pushes)

    def _forget(self, pushes: Pushes) -> None:
        """A push has ended before its transfers: `OutgoingInFlight` looks after these, and they hold up nobody here."""
        for flight in list(self._flights):
            if pushes in flight.lists:
                flight.lists.remove(pushes)
                pushes.flights -= 1
                if not flight.lists:
                    del self._flights[flight]
                    self.pace.forgotten(flight.nbytes)

    # What goes.

    def _submit_next(self) -> bool:
        """Submit the batch whose turn it is. Returns whether there was one that may go."""
        small = bool(self._small) and (not self._turns or self._ahead < self.pace.batch_bytes)
        if small and self.pace.admits_small():
            self._submit_all(self._take())
            return True
        if self._turns and self.pace.admits():
            self._ahead = max(0, self._ahead - self.pace.batch_bytes)
            self._submit_all([self._turns.popleft()])
            return True
        return False

    def _submit_all(self, lists: list[Pushes]) -> None:
        """Submit the next batches of deliveries, as one."""
        offered: list[tuple[Pushes, Batch]] = []
        for pushes in lists:
            pushes.queued = False
            if pushes.cancelled.raised:  # the job that reports this waits behind this one
                self._notice(pushes)
                continue
            asks = pushes.asks
            if asks is None:  # its push begins
                quick = pushes.waiting[0].quick
                asks = pushes.step()
                if not isinstance(asks, Batch):
                    self._place(pushes, asks, quick=quick)
                    continue
            assert isinstance(asks, Batch), "who waits for a turn begins, or asks for a batch"
            offered.append((pushes, asks))
        if offered:
            since = self._now()
            answers = submit_together(self._backend, self._peer, [batch for _, batch in offered])
            self._answer(offered, answers, since)

    def _take(self) -> list[Pushes]:
        """Take out small pushes that go as one batch."""
        taken: list[Pushes] = []
        blocks = nbytes = 0
        while self._small:
            following = self._small[0].waiting[0]
            blocks += following.blocks
            nbytes += following.nbytes
            if taken and not (self._joins and self._joinable(blocks, nbytes)):
                break
            taken.append(self._small.popleft())
            self._ahead = self._ahead + following.nbytes if self._turns else 0
        return taken

    def _joinable(self, blocks: int, nbytes: int) -> bool:
        return blocks <= self._joint_blocks and nbytes <= self._joint_bytes

    def _answer(
        self, offered: list[tuple[Pushes, Batch]], answers: list[Transfer | BaseException], since: float
    ) -> None:
        """Tell each delivery what became of its batch."""
        self._progress = now = self._now()
        self._nap = FIRST_NAP
        flights: list[Flight] = []
        moved = 0
        for (pushes, batch), answer in zip(offered, answers, strict=True):
            if not isinstance(answer, Transfer):
                continue
            nbytes = batch.blocks.total
            if answer.outcome is not None:
                moved += nbytes
            elif flights and flights[-1].transfer is answer:
                flights[-1].lists.append(pushes)
                flights[-1].nbytes += nbytes
            else:
                flights.append(Flight(answer, [pushes], nbytes, since))
        if moved:
            self.pace.ended_at_once(moved, since, now)
        for flight in flights:
            flight.began = self.pace.began(flight.nbytes)
            self._flights[flight] = None
            for pushes in flight.lists:
                pushes.flights += 1
        for (pushes, _), answer in zip(offered, answers, strict=True):
            self._step(pushes, answer)
        if self._unpolled:
            for flight in flights:
                if flight in self._flights:
                    flight.transfer.notify(partial(self._note, flight))

    def _note(self, flight: Flight) -> None:
        """A flight has ended. Any thread."""
        self._landed.append(flight)
        self._call()
