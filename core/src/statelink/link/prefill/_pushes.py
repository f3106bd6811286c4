"""The place of one delivery's pushes in the line to their decode rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from statelink.link.runtime import Flag

if TYPE_CHECKING:
    from statelink.backend import Batch, Moved, Transfer
    from statelink.link.runtime import Moving, Until

    from ._push import Push

__all__ = ["PushResult", "Pushes", "Then", "Waiting"]


class PushResult(NamedTuple):
    """What became of one push to one destination.

    Attributes:
        push: The push.
        moving: The result of `move`: bytes, blocks, and why it failed.
        granules: Per component, ``[first, last)`` of the granules that the push has.
        moved: Per component, the bytes and blocks that the backend was given.
        digests: Per component, the digest of all pushes so far, where both sides verify.
        landing: Whether the backend has all of it, and bytes may still be under way. Another result follows, then.
    """

    push: Push
    moving: Moving
    granules: dict[str, tuple[int, int]]
    moved: dict[str, Moved]
    digests: dict[str, bytes]
    landing: bool = False


Then = Callable[[PushResult], None]
"""Called on the control thread with what became of a push. For a last one that decode itself sees land, also before."""


class Waiting(NamedTuple):
    """A push that is not visible at the destination yet.

    Attributes:
        push: The push.
        then: What to call once it is.
        blocks: Most blocks that it becomes.
        nbytes: Most bytes that it has.
        quick: Whether the control thread may carry it.
    """

    push: Push
    then: Then
    blocks: int
    nbytes: int
    quick: bool


class Pushes(ABC):
    """The pushes of one delivery, which go one after the other. Belongs to the jobs with the peer's key.

    Attributes:
        cancelled: Set by the control thread when the room failed.
        waiting: The pushes that are not visible yet. The first one is under way, or is the next to begin. The control
            thread appends to it.
        prompt: Whether no hook of them ever blocks, and nothing is digested. Set when the hooks are opened.
        asks: What the push that is under way waits for; ``None`` if none is. The line's.
        queued: Whether it waits for its turn, to begin its next push or to submit a batch. The line's.
        flights: Its transfers that have not ended. The line's.
    """

    def __init__(self) -> None:
        self.cancelled = Flag()
        self.waiting: deque[Waiting] = deque()
        self.prompt = False
        self.asks: Batch | Until | None = None
        self.queued = False
        self.flights = 0

    @abstractmethod
    def step(self, answer: Transfer | BaseException | None = None) -> Batch | Until | None:
        """Go on with the first push. A job with the peer's key.

        Args:
            answer: The transfer of the batch that this asked for before; what ``submit`` or ``poll`` raised; or
                ``None``.

        Returns:
            The next batch, or what the push waits for; ``None`` once it is visible at the destination or has failed,
            which was reported.
        """
