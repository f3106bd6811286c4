"""What may still write to this side's memory for one prefill rank of one room, or read it.

A writer may write from the moment when its request may have been sent, or when its grant is made. It has *drained* once
one of these holds:

- it says so, with `wire.Drained` or with its last message;
- its grant is revoked, where this side's backend has a fence;
- its process has ended, and what its kernel still held has had time to land;
- it was never asked, and without a grant nobody writes;
- the operator's option ``take_back_after`` is over, which proves nothing: see `RoomMemory.taken_back`.

Beside it, this process itself touches the memory while a receive hook, its transfer or a comparison of digests is under
way. No time that has passed ends any of it.
"""

from __future__ import annotations

__all__ = ["WriterInFlight"]


class WriterInFlight:
    """What of one writer is in flight. Belongs to the control thread; any thread may read it.

    Attributes:
        asked: Whether the request was sent, or may have been.
        drained: Whether no write of it can land any more.
        working: How many hooks, their transfers, and comparisons of digests have not ended.
    """

    __slots__ = ("_under_way", "asked", "drained", "working")

    def __init__(self) -> None:
        self.asked = False
        self.drained = False
        self.working = 0
        self._under_way: dict[str, int] = {}
        """What has not ended, as texts, and how many of each."""

    def __bool__(self) -> bool:
        return not self.drained or self.working > 0

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
