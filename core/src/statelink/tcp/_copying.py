"""Copies a batch out of the sender's memory, on one thread or on several."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from ._iovec import Vectors, copy

if TYPE_CHECKING:
    from ._grants import Grant

__all__ = ["PIECE_BYTES", "Copier"]

PIECE_BYTES: Final = 8 << 20
"""Most bytes that are moved between two checks of the grant. Smaller pieces would make a revoke faster. Larger ones
cost less: after each, a thread waits for the interpreter, which takes 5 ms beside an engine that computes."""
WORTHWHILE: Final = 4 << 20
"""Least bytes of a batch that several threads copy."""
THREADS: Final = 2
"""How many threads copy such a batch. Two copy about 1.6 times as fast as one: a single thread does not use all of the
memory's bandwidth."""


class Copier:
    """Copies batches of one peer. Belongs to the thread that receives from it, which copies, too.

    The other threads are started for the first large batch, and end with `close`.

    Args:
        peer: The peer's link name, for the names of the threads.
    """

    def __init__(self, peer: str) -> None:
        self._name = f"tcp-copy-{peer}"
        self._pool: ThreadPoolExecutor | None = None

    def copy(
        self, pid: int, grant: Grant, source: Vectors, target: Vectors, look: Callable[[], None]
    ) -> tuple[int, OSError | None]:
        """Copy a batch. Returns once no thread touches memory any more.

        Args:
            pid: The process whose memory is read.
            grant: Allows the batch. If it is revoked, no further piece begins.
            source: Memory of that process.
            target: Memory of this process, with as many bytes.
            look: Called before each piece of the calling thread. What it raises ends the copy, and is raised here.

        Returns:
            How many bytes were copied, and why the kernel copied no more, if it is that. Without an error, and with
            fewer bytes than there are, the grant was revoked.
        """
        alone = target.total < WORTHWHILE
        share = target.total if alone else -(-target.total // THREADS)
        batch = _Batch(pid, grant, _pieces(target.total, min(PIECE_BYTES, share)))
        if alone:
            return batch.work(source, target, look), batch.failed
        helpers = self._help(batch, source, target)
        try:
            moved = batch.work(source, target, look)
        except BaseException:
            batch.ended = True
            raise
        finally:
            # A helper that has not begun is not needed any more: this thread has left nothing to do.
            counts = [helper.result() for helper in helpers if not helper.cancel()]
        return moved + sum(counts), batch.failed

    def close(self) -> None:
        """End the other threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _help(self, batch: _Batch, source: Vectors, target: Vectors) -> list[Future[int]]:
        helpers: list[Future[int]] = []
        with contextlib.suppress(RuntimeError):  # no thread can be started, such as while Python ends
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS - 1, self._name)
            helpers.extend(
                self._pool.submit(batch.work, source.twin(), target.twin(), _nothing) for _ in range(THREADS - 1)
            )
        return helpers


class _Batch:
    """One batch, of which threads take pieces in turn.

    Attributes:
        ended: Set by any thread; no further piece begins.
        failed: Why the kernel copied no more.
    """

    def __init__(self, pid: int, grant: Grant, pieces: Iterator[tuple[int, int]]) -> None:
        self.ended = False
        self.failed: OSError | None = None
        self._pid = pid
        self._grant = grant
        self._pieces = deque(pieces)
        """Where pieces begin and end. A deque gives each of them to one thread. An iterator that threads share does so
        only where the interpreter has a lock."""

    def work(self, source: Vectors, target: Vectors, look: Callable[[], None]) -> int:
        """Copy pieces until there are none left. Returns how many bytes. One of the threads that copy runs this."""
        moved = 0
        while True:
            try:
                start, stop = self._pieces.popleft()
            except IndexError:
                return moved
            position = start
            while position < stop:
                if self.ended:
                    return moved
                look()
                if not self._grant.enter():
                    self.ended = True
                    return moved
                try:
                    done = copy(self._pid, source, target, position, stop - position)
                except OSError as error:
                    self.ended, self.failed = True, error
                    return moved
                finally:
                    self._grant.leave()
                position += done
                moved += done


def _pieces(total: int, piece: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a batch begin and end."""
    starts = range(0, total, piece)
    return zip(starts, [*starts[1:], total], strict=True)


def _nothing() -> None:
    pass
