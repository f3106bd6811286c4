"""Gives the small pushes of several rooms to a backend together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

from statelink.link.runtime import submit_together

if TYPE_CHECKING:
    from statelink.backend import Batch, Transfer
    from statelink.link._context import Context

__all__ = ["JointPushes"]

JOINT_BYTES = 2 << 20
"""Most bytes of pushes that are submitted together: less than a millisecond of copying."""
JOINT_BLOCKS = 500
"""Most blocks of pushes that are submitted together. With more, numpy lets go of the interpreter."""


Begin = Callable[[], "Batch | None"]
Resume = Callable[["Transfer | BaseException | None"], Generator[float, None, None]]


class _Waiting(NamedTuple):
    """One push. See `JointPushes.add`."""

    begin: Begin
    resume: Resume
    blocks: int
    nbytes: int


class JointPushes:
    """The small pushes to one decode rank that have not begun.

    A call into a library may cost more than the bytes of a small room: each return from it waits for the interpreter,
    up to 5 ms while the engine's thread computes. So pushes wait until the control thread has handled what came before
    them, or until a data thread has moved those before, and then go in one batch. A backend allows this with
    ``Capabilities.joins_rooms``.

    The control thread adds them. The job with the peer's key, of which one runs at a time, takes them out.

    Args:
        context: The link's parts.
        peer: Link name of the decode rank.

    Attributes:
        blocks: Most blocks that are submitted together.
        nbytes: Most bytes.
    """

    def __init__(self, context: Context, peer: str) -> None:
        limits = context.backend.capabilities
        self.blocks = min(JOINT_BLOCKS, limits.max_blocks)
        self.nbytes = min(limits.prompt_bytes or JOINT_BYTES, JOINT_BYTES, limits.max_bytes, context.config.slice_bytes)
        self._context = context
        self._peer = peer
        self._key = "peer", peer
        """The key of its job."""
        self._waiting: deque[_Waiting] = deque()
        """The job takes out while the control thread appends: nobody may iterate over it."""
        # The control thread alone uses these.
        self._called = False
        """Whether `_call` was posted and has not run."""
        self._at_once = True
        """Whether no call for the pushes that were added since the last `_call` blocks."""

    def add(self, begin: Begin, resume: Resume, blocks: int, nbytes: int, *, at_once: bool) -> None:
        """Move a push with others, soon. Control thread.

        Args:
            begin: Plans it, and returns its first batch; ``None`` if it has none yet, or failed.
            resume: Goes on after that, given the batch's transfer, or what ``submit`` raised, or ``None``.
            blocks: Most blocks that it becomes.
            nbytes: Most bytes that it has.
            at_once: Whether no call for it blocks while no other job runs.
        """
        self._waiting.append(_Waiting(begin, resume, blocks, nbytes))
        self._at_once = self._at_once and at_once
        if not self._called:
            self._called = True
            self._context.post(self._call)

    def _call(self) -> None:
        """Start the job that moves what waits. Control thread, after the jobs that were posted before."""
        at_once, self._at_once = self._at_once, True
        self._called = False
        moves = self._context.workers.moves
        if at_once:  # then it runs here only if no job of the peer is under way or queued: nothing else waits
            moves.submit_promptly(self._key, self._move, alone=True)
        else:
            moves.submit(self._key, self._move)

    def _move(self) -> Generator[float, None, None]:
        """Move what waits. A job with the peer's key."""
        while self._waiting:
            begun: list[tuple[Resume, Batch]] = []
            others: list[Resume] = []
            for each in self._take():
                batch = each.begin()
                if batch is None:
                    others.append(each.resume)
                else:
                    begun.append((each.resume, batch))
            answers = submit_together(self._context.backend, self._peer, [batch for _, batch in begun])
            for (resume, _), answer in zip(begun, answers, strict=True):
                yield from resume(answer)
            for resume in others:
                yield from resume(None)
            if self._waiting:
                yield 0.0  # a sign of life between two batches

    def _take(self) -> list[_Waiting]:
        """Take out the pushes that one batch can carry."""
        taken: list[_Waiting] = []
        blocks = nbytes = 0
        while self._waiting:
            following = self._waiting[0]
            blocks += following.blocks
            nbytes += following.nbytes
            if taken and (blocks > self.blocks or nbytes > self.nbytes):
                break
            taken.append(self._waiting.popleft())
        return taken
