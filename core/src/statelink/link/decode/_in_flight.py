"""What may still write to this side's memory for one prefill rank of one room, or read it.

A writer may write from the moment when its request may have been sent, or when its grant is made. It has *drained* once
there is a `Proof`. Beside it, this process itself touches the memory while a receive hook, its transfer or a comparison
of digests is under way. No time that has passed ends any of it: what an engine or ``take_back_after`` takes back is in
flight as before.
"""

from __future__ import annotations

import enum

__all__ = ["Proof", "WriterInFlight"]


class Proof(enum.Enum):
    """What proves that no write of a writer can land any more. Only the code that finds such a proof hands it on."""

    DRAINED = "it says so"
    """With `wire.Drained`, or with a goodbye that says that nothing is in flight."""
    FINISHED = "everything has landed, as its last message says, or as this side's backend saw after that message"
    UNKNOWN = "the request reached a process that does not know this link, and that will never write for it"
    UNASKED = "it was never asked, and it has no grant"
    REVOKED = "its grant is revoked, by the fence of this side's backend"
    EXITED = "its process has ended, and what its kernel still held has had time to land"


class WriterInFlight:
    """What of one writer is in flight. Belongs to the control thread; any thread may read it.

    Attributes:
        asked: Whether the request was sent, or may have been.
        proof: Why no write of it can land any more: the first proof that was found; ``None`` before that.
        working: How many hooks, their transfers, and comparisons of digests have not ended.
    """

    __slots__ = ("_under_way", "asked", "proof", "working")

    def __init__(self) -> None:
        self.asked = False
        self.proof: Proof | None = None
        self.working = 0
        self._under_way: dict[str, int] = {}
        """What has not ended, as texts, and how many of each."""

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
