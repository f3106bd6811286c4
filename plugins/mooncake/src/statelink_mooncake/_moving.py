"""Batches that the library moves: when each is submitted, and how the library is asked whether it has ended."""

from __future__ import annotations

import threading
import time
from typing import Any

from statelink.backend import Ends, RegionTable, Transfer

from ._settings import ENTRIES

__all__ = ["Moving", "Peer", "Submitter"]

MARGIN_SECONDS = 0.05
REFUSED = 0, (1 << 64) - 1
"""What the library returns in place of the number of a transfer."""


class Peer:
    """An engine elsewhere.

    Attributes:
        session: Its address.
        table: The memory that it registered.
        entries: Blocks that are on their way there. The lock of `Submitter` guards it.
    """

    __slots__ = ("entries", "session", "table")

    def __init__(self, session: str, table: RegionTable) -> None:
        self.session = session
        self.table = table
        self.entries = 0


class Submitter:
    """Submits batches to the library at moments when that does not wait. Methods may be called from any thread.

    To open a session, the library asks the peer, and holds a lock of the whole engine until the peer has answered. A
    batch that is submitted meanwhile would wait for that lock. And the library fails blocks that are too many for one
    peer at a time. In both cases, a batch is kept, and submitted when it is polled later.

    Args:
        engine: The engine.
        seconds: After how many seconds the library gives up a batch; its bytes add a little.
    """

    def __init__(self, engine: Any, seconds: float) -> None:
        self._engine: Any = engine
        self.seconds = seconds
        self._lock = threading.Lock()
        """Held for a moment: to count, or to submit a batch."""
        self._opening = 0
        """Sessions that are being opened."""

    def open(self, session: str) -> int:
        """Open a session. Blocks until the peer has answered, or the library has given up. Returns its status."""
        with self._lock:
            engine = self._engine
            self._opening += 1
        try:
            return int(engine.batch_transfer_sync_write(session, [], [], [])) if engine is not None else -1
        finally:
            with self._lock:
                self._opening -= 1

    def submit(self, moving: Moving) -> None:
        """Submit a batch if that does not wait."""
        with self._lock:
            if self._engine is None:
                moving.fail("the backend was closed before the batch was submitted", settled=True)
            elif not self._opening and moving.peer.entries + moving.count <= ENTRIES:
                moving.peer.entries += moving.count
                moving.submit(self._engine)

    def ended(self, moving: Moving) -> None:
        """A batch that was submitted has an outcome."""
        with self._lock:
            moving.peer.entries -= moving.count

    @property
    def engine(self) -> Any:
        """The engine; ``None`` once it was taken."""
        return self._engine

    def take(self) -> Any:
        """Take the engine away. Nothing is submitted any more, and no transfer keeps the engine."""
        with self._lock:
            engine, self._engine = self._engine, None
        return engine


class Moving(Transfer):
    """A batch on its way. Its largest block goes last, and is a transfer of its own.

    The library can be asked for the state of one block without waiting. For a batch it has only a call that waits, and
    that keeps a core busy meanwhile. It begins blocks in their order. So once the last one has ended, the others have
    ended, too, or are about to, and that call is short. It is short also if the last one does not end in time, because
    it counts the same time from the same moment.

    Args:
        submitter: Of the engine.
        peer: The destination.
        ends: The blocks; at least one.
    """

    __slots__ = ("_asking", "_columns", "_deadline", "_last", "_rest", "_submitter", "count", "peer")

    def __init__(self, submitter: Submitter, peer: Peer, ends: Ends) -> None:
        super().__init__()
        self.peer = peer
        self._submitter = submitter
        columns = ends.here.tolist(), ends.there.tolist(), ends.nbytes.tolist()
        largest = int(ends.nbytes.argmax())
        for column in columns:
            column[largest], column[-1] = column[-1], column[largest]
        self.count = len(columns[2])
        self._columns: tuple[list[int], list[int], list[int]] | None = columns
        self._deadline = 0.0
        self._rest: list[int] = []
        self._last = 0
        self._asking = threading.Lock()
        """Held to ask the library, which forgets a transfer once it has said that it ended."""
        submitter.submit(self)

    def submit(self, engine: Any) -> None:
        """Give the blocks to the library. For `Submitter`, once."""
        columns, self._columns = self._columns, None
        assert columns is not None, "a batch is submitted once"
        here, there, nbytes = columns
        self._deadline = time.monotonic() + self._submitter.seconds + sum(nbytes) * 1e-9 + MARGIN_SECONDS
        if self.count > 1:
            self._rest = [engine.batch_transfer_async_write(self.peer.session, here[:-1], there[:-1], nbytes[:-1])]
        self._last = engine.transfer_submit_write(self.peer.session, here[-1], there[-1], nbytes[-1])

    def poll(self) -> None:
        """Submit the batch if it was not yet, or set the outcome if it has ended. Any thread."""
        if self._asking.acquire(blocking=False):
            try:
                if self.outcome is None:
                    self._go_on()
            finally:
                self._asking.release()

    def _go_on(self) -> None:
        if self._columns is not None:
            self._submitter.submit(self)
            return
        reason = self._asked()
        if reason is None:
            return
        if reason:
            # The library gives no reason. Its threads may continue with any part of the batch: if the peer was only
            # stopped, they read the source minutes later. Only the engine's end proves that they have ended.
            self.fail(reason, settled=False)
        else:
            self.succeed()
        self._submitter.ended(self)

    def _asked(self) -> str | None:
        """Why the batch failed; empty if it has arrived, ``None`` while it is on its way."""
        engine = self._submitter.engine
        if engine is None:
            return "the backend was closed while Mooncake moved the batch"
        if self._last in REFUSED or any(each in REFUSED for each in self._rest):
            return f"Mooncake took {self.count} blocks in part; it prints why to standard error"
        status = engine.transfer_check_status(self._last)
        late = time.monotonic() > self._deadline
        if status == 0 and not late:
            return None
        rest = engine.get_batch_transfer_status(self._rest) if self._rest else 0
        if status == 1 and rest == 0:
            return ""
        return f"Mooncake returned {rest or status or -1} for {self.count} blocks; it prints why to standard error"
