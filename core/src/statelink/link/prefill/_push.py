"""One push of the engine, what becomes of it at one destination, and the place of a delivery's pushes in the line."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from statelink.link._ready import Ready
from statelink.link.runtime import Flag
from statelink.plan import Items

if TYPE_CHECKING:
    from statelink.backend import Batch, Moved, Side, Transfer
    from statelink.errors import Reason

__all__ = ["Moving", "Push", "PushResult", "Pushes", "Then", "Until", "Waiting"]


class Push(msgspec.Struct, frozen=True):
    """One call of `Sending.push`.

    Attributes:
        number: Its number in the room, from 0.
        items: Checked items per component.
        span: ``[a, b)`` positions that it covers.
        layers: ``[first, last)`` model layers; ``None`` for all buffers.
        ready: The ready event that guards the memory, if there is one.
        last: Whether it is the last push of the room.
    """

    number: int
    items: Mapping[str, Items]
    span: tuple[int, int]
    layers: tuple[int, int] | None
    ready: Ready | None
    last: bool


class Until(enum.Enum):
    """What something waits for that moves."""

    ENDED = "ended"
    """All transfers of its batches have ended, or one has failed."""
    WOKEN = "woken"
    """Somebody wakes it."""


class Moving(NamedTuple):
    """What became of a move.

    Attributes:
        nbytes: Bytes moved.
        blocks: Blocks moved.
        reason: Why it failed, or ``None``.
        unsettled: Sides on which writes may be in flight although there is no transfer to poll: ``submit`` raised what
            it must not.
        pending: Transfers that had not ended when the move was given up.
        strays: Transfers that failed and are not settled. The backend may settle them later.
    """

    nbytes: int
    blocks: int
    reason: Reason | None
    unsettled: frozenset[Side] = frozenset()
    pending: tuple[Transfer, ...] = ()
    strays: tuple[Transfer, ...] = ()


class PushResult(NamedTuple):
    """What became of one push to one destination.

    Attributes:
        push: The push.
        peer: Link name of the destination.
        moving: The result of `move`: bytes, blocks, and why it failed.
        granules: Per component, ``[first, last)`` of the granules that the push has.
        moved: Per component, the bytes and blocks that the backend was given.
        digests: Per component, the digest of all pushes so far, where both sides verify.
        landing: Whether the backend has all of it, and bytes may still be under way. Another result follows, then.
    """

    push: Push
    peer: str
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
