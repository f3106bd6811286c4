"""Which of prefill's DP ranks has a request, where the room alone does not say it.

SGLang's controller on prefill may give a request to any DP rank. The scheduler that gets it tells the bootstrap server
of its own server (`Registrar`), and decode asks that server. Neither waits on a scheduler's thread, and both send many
rooms at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from statelink.backend import logger

from ._http import ask_ranks
from ._server import MOST_ROOMS

__all__ = ["RankFinder"]

log = logger("statelink.sglang")

PAUSE_SECONDS = 0.01
"""Least seconds between two questions of one thread to one bootstrap server."""
LONGEST_PAUSE_SECONDS = 0.1
"""Seconds between two questions for rooms that no DP rank of prefill has got yet, in the end."""
FAILED_PAUSE_SECONDS = 0.5
"""Seconds until a bootstrap server that did not answer is asked again."""
RANK_ANSWER_SECONDS = 5.0
"""Seconds that a bootstrap server may take for an answer."""


class RankFinder:
    """Asks bootstrap servers which DP rank has a room, until one has it or the room is forgotten.

    A daemon thread asks one server, for all rooms that are looked for there, and ends when there are none. Only servers
    that have answered as prefill servers are asked, so these threads are few.

    Args:
        ask: Asks a server: its address, rooms, and the seconds for the answer.
        pause: Seconds until a server that did not answer is asked again.
    """

    def __init__(
        self,
        ask: Callable[[str, Sequence[int], float], dict[int, int]] = ask_ranks,
        pause: float = FAILED_PAUSE_SECONDS,
    ) -> None:
        self._ask_server, self._pause = ask, pause
        self._lock = threading.Lock()
        self._wanted: dict[str, set[int]] = {}
        """By server, the rooms whose rank is not known. A server is here for as long as a thread asks it."""
        self._found: dict[tuple[str, int], int] = {}

    def find(self, address: str, room: int) -> int | None:
        """The DP rank that has a room, if it is known by now. If not, the server is asked. Does not block."""
        found = self._found.get((address, room))
        if found is None:
            with self._lock:
                rooms = self._wanted.get(address)
                if rooms is None:
                    self._wanted[address] = {room}
                    threading.Thread(target=self._ask, args=(address,), name="statelink-dp-ranks", daemon=True).start()
                else:
                    rooms.add(room)
        return found

    def forget(self, address: str, room: int) -> None:
        """Nobody looks for the room any more. Does not block."""
        with self._lock:
            self._wanted.get(address, set()).discard(room)
            self._found.pop((address, room), None)

    def _ask(self, address: str) -> None:
        """Runs on a thread of its own, while rooms are looked for at one server."""
        pause, asked = PAUSE_SECONDS, set[int]()
        while True:
            with self._lock:
                rooms = self._wanted[address]
                if not rooms:
                    del self._wanted[address]
                    return
                new = rooms - asked
                asked = set(sorted(rooms, key=asked.__contains__)[:MOST_ROOMS])
            pause = PAUSE_SECONDS if new else min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                found = self._ask_server(address, sorted(asked), RANK_ANSWER_SECONDS)
            except (OSError, ValueError) as error:
                log.debug("the bootstrap server %s does not say which DP ranks have rooms: %s", address, error)
                pause = self._pause
            except Exception:  # a defect here must not end the questions
                log.exception("asking the bootstrap server at %s for DP ranks", address)
                pause = self._pause
            else:
                self._answered(address, found)
            time.sleep(pause)

    def _answered(self, address: str, found: dict[int, int]) -> None:
        with self._lock:
            rooms = self._wanted[address]
            for room in rooms & found.keys():
                rooms.discard(room)
                self._found[address, room] = found[room]
