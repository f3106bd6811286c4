"""What a rank of prefill tells the bootstrap server of its server: where it is, and which rooms its DP rank has."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from statelink.backend import logger

from ._server import MOST_ROOMS

if TYPE_CHECKING:
    from ._http import Bootstrap
    from ._server import Row

__all__ = ["Registrar"]

log = logger("statelink.sglang")

PERIOD_SECONDS = 3.0
"""Seconds between two registrations. A bootstrap server forgets a rank after a little more than three of them."""
FAILED_PAUSE_SECONDS = 0.5
"""Seconds until a bootstrap server that did not take something is told again."""
PUT_ANSWER_SECONDS = 5.0
"""Seconds that a bootstrap server may take for an answer."""
ROOMS_PAUSE_SECONDS = 0.01
"""Least seconds between two messages with rooms."""
QUIET_FAILURES = 16
"""Failed exchanges without an answer before the first warning: the bootstrap server starts after the schedulers."""


class Registrar:
    """Keeps a rank of prefill registered at a bootstrap server, and tells it which rooms the rank's DP rank has.

    One daemon thread does both, until `close`. So a bootstrap server that was started anew learns the rank by itself.
    What the server refuses is tried again: it may still know ranks of an earlier start, which expire.

    Args:
        bootstrap: The server. It belongs to the thread from now on.
        row: The rank.
        period: Seconds between two registrations.
        pause: Seconds until a server that did not take something is told again.
    """

    def __init__(
        self, bootstrap: Bootstrap, row: Row, period: float = PERIOD_SECONDS, pause: float = FAILED_PAUSE_SECONDS
    ) -> None:
        self._bootstrap, self._period, self._pause = bootstrap, period, pause
        self._row = row
        self._said: SimpleQueue[int | None] = SimpleQueue()
        """Rooms to tell; ``None`` wakes the thread up."""
        self._closed = False
        self._failed: dict[str, tuple[str, int]] = {}
        """What the server did not take when it was last told, why, and how often in a row for this reason."""
        self._thread = threading.Thread(target=self._run, name="statelink-register", daemon=True)
        self._thread.start()

    def register(self, row: Row) -> None:
        """The rank is described by another row from now on. Does not block. Any thread."""
        self._row = row
        self._said.put(None)

    def announce(self, room: int) -> None:
        """The rank's DP rank has a room. Does not block. Any thread."""
        self._said.put(room)

    def close(self) -> None:
        """Stop, once an exchange that is under way has ended. Blocks until then. The server forgets the rank later."""
        self._closed = True
        self._said.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Runs on a thread of its own."""
        row, due, rooms = None, 0.0, list[int]()
        while not self._closed:
            if row is not self._row or time.monotonic() >= due:
                row = self._row
                due = time.monotonic() + (self._period if self._told_rank(row) else self._pause)
            rooms = rooms or self._waiting(due)
            if rooms:
                if self._told_rooms(row.dp_rank, rooms):
                    rooms, pause = [], ROOMS_PAUSE_SECONDS
                else:
                    due, pause = 0.0, self._pause  # the server may not know this rank any more
                time.sleep(pause)

    def _waiting(self, due: float) -> list[int]:
        """Rooms that wait to be told. Waits for one until a registration is due, or until the thread is woken up."""
        rooms = list[int]()
        try:
            room = self._said.get(timeout=max(0.0, due - time.monotonic()))
            while room is not None:
                rooms.append(room)
                room = self._said.get_nowait() if len(rooms) < MOST_ROOMS else None
        except Empty:
            pass
        return rooms

    def _told_rank(self, row: Row) -> bool:
        what = f"rank {row.rank} of {row.ranks} of DP rank {row.dp_rank}"
        return self._told(what, lambda: self._bootstrap.put(row, PUT_ANSWER_SECONDS))

    def _told_rooms(self, dp_rank: int, rooms: list[int]) -> bool:
        what = f"rooms of DP rank {dp_rank}"
        return self._told(what, lambda: self._bootstrap.put_rooms(dp_rank, rooms, PUT_ANSWER_SECONDS))

    def _told(self, what: str, tell: Callable[[], None]) -> bool:
        where, (former, times) = self._bootstrap.address, self._failed.get(what, ("", 0))
        level, why = logging.WARNING, ""
        try:
            tell()
        except OSError as error:
            why = str(error) or type(error).__name__
            level = logging.WARNING if times + 1 >= QUIET_FAILURES else logging.DEBUG
        except ValueError as error:
            why = str(error)
        except Exception as error:  # a defect here must not end the registrations
            level, why = logging.ERROR, f"{type(error).__name__}: {error}"
        if why:
            times = times + 1 if why == former else 1
            self._failed[what] = why, times
            if times.bit_count() == 1:
                text = "the bootstrap server %s does not take %s (%d times), and is told again: %s"
                log.log(level, text, where, what, times, why)
        elif times or what not in self._failed:
            self._failed[what] = "", 0
            log.info("the bootstrap server %s has taken %s", where, what)
        return not why
