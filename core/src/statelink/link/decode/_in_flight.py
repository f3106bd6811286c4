"""What may still write to this side's memory for one prefill rank of one room, or read it.

A writer may write from the moment when its request may have been sent, or when its grant is made. It has *drained* once
there is a `Proof`. Beside it, this process itself touches the memory while a receive hook, its transfer or a comparison
of digests is under way. No time that has passed ends any of it: what an engine or ``take_back_after`` takes back is in
flight as before.

The process exit watch, `ProcessExits`, notices that a writer's process has ended, and waits until nothing of it can
land any more.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from statelink.backend import Fence

if TYPE_CHECKING:
    from statelink.backend import Capabilities
    from statelink.link.runtime import Loop, Workers

    from ._instance import PrefillRank

__all__ = ["LANDING_ROUND_SECONDS", "IncomingInFlight", "ProcessExits", "Proof"]

LANDING_ROUND_SECONDS = 0.05
"""Seconds from one round to the next.

After a writer's process has ended, decode waits for some rounds. Only then nothing of the writer counts as in flight.
`Capabilities.landing_seconds` says how long all rounds take together. During the rounds, bytes that a killed writer
gave to its kernel still arrive, and threads of a library in this process write them to memory. Measurements found that
this takes a few milliseconds. The size of socket buffers bounds it. This class counts rounds and not elapsed time,
because a process that is stopped also stops the library's threads, and they write nothing."""
POLL_BROKEN_SECONDS = 1.0
"""Seconds to the next round after ``poll`` raised."""


class Proof(enum.Enum):
    """What proves that no write of a writer can land any more. Only the code that finds such a proof hands it on."""

    DRAINED = "it says so"
    """With `wire.Drained`, or with a goodbye that says that nothing is in flight."""
    FINISHED = "everything has landed, as its last message says, or as this side's backend saw after that message"
    UNKNOWN = "the request reached a process that does not know this link, and that will never write for it"
    UNASKED = "it was never asked, and it has no grant"
    REVOKED = "its grant is revoked, by the fence of this side's backend"
    EXITED = "its process has ended, and what its kernel still held has had time to land"


class IncomingInFlight(msgspec.Struct, eq=False):
    """What of one writer is in flight. Belongs to the control thread; any thread may read it.

    Attributes:
        asked: Whether the request was sent, or may have been.
        proof: Why no write of it can land any more: the first proof that was found; ``None`` before that.
        working: How many hooks, their transfers, and comparisons of digests have not ended.
    """

    asked: bool = False
    proof: Proof | None = None
    working: int = 0
    _under_way: dict[str, int] = {}
    """What has not ended, as texts, and how many of each. Each object has a dictionary of its own."""

    def __bool__(self) -> bool:
        return not self.drained or self.working > 0

    @property
    def drained(self) -> bool:
        """Whether no write of it can land any more."""
        return self.proof is not None

    def prove(self, proof: Proof) -> None:
        """Take note of a proof that no write of it can land any more."""
        self.proof = self.proof or proof

    def begin(self, what: str) -> None:
        """A hook or a comparison begins."""
        self.working += 1
        self._under_way[what] = self._under_way.get(what, 0) + 1

    def end(self, what: str) -> None:
        """A hook or a comparison has ended, and with it the transfer that it returned."""
        self.working -= 1
        self._under_way[what] -= 1

    @property
    def words(self) -> str:
        """Which hooks and comparisons are under way; empty for none."""
        return " and ".join(what for what, count in list(self._under_way.items()) if count)


class ProcessExits:
    """Waits, for each prefill rank whose process has ended, until nothing of it can land. Control thread.

    Args:
        loop: The control thread's loop.
        workers: The data threads, which poll the backend.
        declared: What the backend declares.
        landed: Called with each such rank, and the proof, once the wait is over.
    """

    def __init__(
        self, loop: Loop, workers: Workers, declared: Capabilities, landed: Callable[[PrefillRank, Proof], None]
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._landed = landed
        self._waiting: set[str] = set()
        # If a write can land at any time after its mover's end, no wait proves anything.
        self._proves = declared.target is not Fence.NONE
        self._rounds = math.ceil(declared.landing_seconds / LANDING_ROUND_SECONDS)

    def look(self, ranks: Iterable[PrefillRank]) -> None:
        """Look whether the processes of undrained ranks have ended. Called with every heartbeat."""
        for rank in ranks:
            if self._proves and rank.name not in self._waiting and rank.exited:
                self._waiting.add(rank.name)
                self._wait(rank, self._rounds)

    def _wait(self, rank: PrefillRank, rounds: int) -> None:
        if not rounds:
            self._waiting.discard(rank.name)
            self._landed(rank, Proof.EXITED)
            return

        # Runs on the control thread after a data thread has polled. So both threads have run in this round. If the
        # poll raised, the library may have written nothing to memory, and the round does not count.
        def polled(ok: bool) -> None:
            if ok:
                self._loop.after(LANDING_ROUND_SECONDS, lambda: self._wait(rank, rounds - 1))
            else:
                self._loop.after(POLL_BROKEN_SECONDS, lambda: self._wait(rank, rounds))

        # Some libraries write what arrives to memory only while they are called.
        self._workers.poll(("exit", rank.name), [], polled)
