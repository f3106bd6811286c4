"""A link's data threads, and how a job runs on one of them and hands its result to the control thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from statelink._logs import logger
from statelink.backend import Outcome, Transfer
from statelink.link._reasons import BackendDefect, reason_of

from ._executor import Job, KeyedExecutor, KeyOrder

if TYPE_CHECKING:
    from statelink.backend import Backend
    from statelink.errors import Reason

    from ._loop import Loop

__all__ = ["MakeExecutor", "Workers"]

log = logger("statelink.link")

SPARE_SETUPS = 32
"""Most jobs of `Workers.setups` that may be held at once, as by a peer that does not answer, and delay no other job."""
POLL, POLL_BROKEN = 0.001, 1.0
"""Seconds between two polls of a transfer that is watched; the second number is for after a ``poll`` that raised."""

Result = TypeVar("Result")
MakeExecutor = Callable[[str, int, int, KeyOrder], KeyedExecutor]
"""Makes an executor; see `KeyedExecutor` for what it is given."""


class Workers:
    """The executors of one link. Jobs of one key run in the order in which they were submitted, over all executors.

    A job that is about a peer has the key ``("peer", name)``, so that the backend sees one call about a peer at a time.
    A job that is about the memory of a room has the key ``("room", id)``.

    Args:
        loop: The control thread's loop.
        backend: The backend. Its capabilities say whether it takes several calls at once.
        threads: Most threads that move pushes, and most threads that compute digests.
        make: Makes an executor.

    Attributes:
        moves: Plans pushes, submits them and polls their transfers.
        setups: Finds peers, and connects to them. Connecting may take seconds, so this has threads of its own, unless
            the backend takes only one call at a time.
        fences: Grants, revokes and polls. These calls must not wait for a copy, so this has a thread of its own, with
            the same exception.
        fence_here: Runs a short job of ``fences`` that never blocks on this thread, in its place among the jobs of its
            key. Returns whether it ran. Control thread.
        checks: Computes digests of what arrived.
        readers: Reads large handshakes of peers.
    """

    def __init__(self, loop: Loop, backend: Backend, threads: int, make: MakeExecutor) -> None:
        self._loop = loop
        self._backend = backend
        self._order = order = KeyOrder()
        limits = backend.capabilities
        serial = not limits.thread_safe
        self.moves = make("statelink-move", 1 if serial else threads, limits.most_stalled or 0, order)
        self.setups = self.moves if serial else make("statelink-setup", 2, SPARE_SETUPS, order)
        self.fences = self.moves if serial else make("statelink-fence", 1, 0, order)
        self.fence_here = self.fences.run_here if serial else self.fences.run_beside
        self.checks = make("statelink-verify", threads, 0, order)
        self.readers = make("statelink-read", 1, 0, order)

    def run(
        self,
        executor: KeyedExecutor,
        key: Hashable,
        job: Callable[[], Result],
        then: Callable[[Result | None, Reason | None], None],
        **who: object,
    ) -> None:
        """Run ``job`` on an executor, and ``then`` on the control thread after it. Any thread.

        Args:
            executor: One of this object's.
            key: The job runs after every earlier job of the same key.
            job: May block.
            then: Called with the job's result and ``None``, or with ``None`` and the reason if the job raised.
            who: Parties that the reason names.
        """

        def work() -> None:
            try:
                result = job()
            except BaseException as error:
                reason = reason_of(error, **who)
                self._loop.post_job(then, None, reason)
            else:
                self._loop.post_job(then, result, None)

        executor.submit_job(key, work)

    def poll(
        self,
        key: Hashable,
        transfers: list[Transfer],
        then: Callable[[bool], None],
    ) -> None:
        """Poll transfers once, on a thread of `fences`, and call ``then`` on the control thread. Any thread.

        Args:
            key: As for `run`.
            transfers: Transfers of the backend.
            then: Called with whether ``poll`` returned. One that raises is a defect of the backend, and is logged.
        """

        def work() -> None:
            polled = self._poll(transfers)
            self._loop.post_job(then, polled)

        self.fences.submit_job(key, work)

    def run_transfer(
        self, job: Callable[[], Transfer | None], then: Callable[[bool, Reason | None], None], **who: object
    ) -> None:
        """Run ``job`` on this thread, then follow the transfer that it returns without holding a thread.

        Data threads only.

        Args:
            job: May block. It may return a transfer of the backend.
            then: Called on the control thread. Given whether job and transfer succeeded, and the reason if the job
                raised.
            who: Parties that the reason names.
        """
        try:
            transfer: object = job()
            if transfer is not None and not isinstance(transfer, Transfer):
                raise BackendDefect.returned(self._backend, "a hook returned", transfer, "a Transfer or None")
        except BaseException as error:
            reason = reason_of(error, **who)
            self._loop.post_job(then, False, reason)
        else:
            if transfer is None:
                self._loop.post_job(then, True, None)
            else:
                self.watch(transfer, then, **who)

    def watch(self, transfer: Transfer, then: Callable[[bool, Reason | None], None], **who: object) -> None:
        """Poll one transfer until it ends, without holding a thread. Data threads only.

        Args:
            transfer: A transfer of the backend.
            then: Called on the control thread. Given whether the transfer succeeded, and the reason if its outcome is
                of a wrong type.
            who: Parties that the reason names.
        """
        polled = transfer.outcome is not None or self._poll([transfer])
        outcome: object = transfer.outcome
        if outcome is not None:
            ok, reason = False, None
            if isinstance(outcome, Outcome):
                ok = outcome.ok
            else:
                wrong = BackendDefect.returned(self._backend, "`Transfer.outcome` is", outcome, "an Outcome")
                log.error("%s", wrong)
                reason = reason_of(wrong, **who)
            self._loop.post_job(then, ok, reason)
            return
        again: Job = partial(self.watch, transfer, then, **who)
        # Only the control thread has timers: it waits, and then submits the next poll to a data thread.
        look = partial(self.fences.submit_job, ("await", id(transfer)), again)
        self._loop.post_job(self._loop.after, POLL if polled else POLL_BROKEN, look)

    def _poll(self, transfers: list[Transfer]) -> bool:
        try:
            self._backend.poll(transfers)
        except BaseException:
            log.exception("backend %s failed to poll", self._backend.name)
            return False
        return True

    def revive(self) -> None:
        """Start threads for jobs that wait because the system had no thread left. Control thread, at heartbeats."""
        for executor in (self.moves, self.setups, self.fences, self.checks, self.readers):
            executor.revive()

    @property
    def lack(self) -> str:
        """Why jobs wait for a thread that could not be started; empty if none do. Any thread."""
        executors = (self.moves, self.setups, self.fences, self.checks, self.readers)
        return next((each.lack for each in executors if each.lack), "")

    @property
    def idle(self) -> bool:
        """Whether no job is under way or queued. Any thread."""
        with self._order.lock:
            return self._order.idle

    def use(self, backend: Backend) -> None:
        """Call another object of the same backend from now on. While no job uses the one before."""
        self._backend = backend

    def waiting(self) -> dict[str, int]:
        """Jobs that have not started, by kind. Any thread."""
        named = {
            "moves": self.moves,
            "setups": self.setups,
            "fences": self.fences,
            "checks": self.checks,
            "handshakes": self.readers,
        }
        return {name: executor.waiting for name, executor in named.items()}

    def close(self, timeout: float, last: Callable[[], None]) -> bool:
        """Run what is queued, end the threads, and then run ``last``. Blocks. Returns whether all ended in time.

        Args:
            timeout: Seconds to wait for each executor, and for ``last``.
            last: Runs on a thread of its own, since it may block; on the control thread if no thread can be started. A
                job that is held inside a library may still run beside it.
        """
        distinct = {id(each): each for each in (self.moves, self.setups, self.fences, self.checks, self.readers)}
        ended = all([executor.close(timeout) for executor in distinct.values()])

        over = threading.Event()

        def run() -> None:
            try:
                last()
            except BaseException:
                log.exception("backend %s failed to close", self._backend.name)
            finally:
                over.set()

        try:
            threading.Thread(target=run, name="statelink-close", daemon=True).start()
        except RuntimeError:
            # The system has no thread left, or the interpreter is about to end and starts none. The control thread has
            # nothing else to do.
            self._loop.post_job(run)
        return over.wait(timeout) and ended
