"""What sending and receiving have in common: the reason of a failure, and what SGLang may see of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ._failure import TransferFailed
from ._hooks import announced

if TYPE_CHECKING:
    from statelink import Room

    from ._manager import Manager

__all__ = ["FAILED", "FOREVER", "Transfer"]

log = logging.getLogger("statelink.sglang")

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
"""SGLang's `KVPoll`, whose numbers are those of `statelink.Status`."""

FOREVER = 7 * 86400.0
"""Seconds that a room may take. SGLang's own clocks, which begin at other moments, end it long before."""


class Transfer:
    """One request. Everything runs on the scheduler's thread, except that `fail` may be called from any thread.

    Args:
        manager: The scheduler's manager.
        room: SGLang's ``bootstrap_room``.
    """

    def __init__(self, manager: Manager, room: Any) -> None:
        self.kv_mgr = manager
        self.bootstrap_room = room
        self.conclude_state: int | None = None
        """The final state that SGLang was told; ``None`` before."""
        self._room: Room | None = None
        self._failure = ""
        request = announced(room)
        self._tokens = 0 if request is None else request.tokens
        if not isinstance(room, int) or room < 1:
            self.fail(f"the request has the room {room!r}; a number above zero is needed")
        elif self._tokens < 1:
            self.fail("the number of tokens of the request is not known")

    def fail(self, reason: str) -> None:
        """Give the request up. The first reason stays. Any thread."""
        self._failure = self._failure or reason
        room = self._room
        if room is not None:
            room.abort(self._failure)

    def abort(self) -> None:
        """SGLang gives the request up: a client has gone, or aborted it. Does not block."""
        self.fail("SGLang aborted the request")

    def clear(self) -> None:
        """SGLang is done with the request. What SGLang asks for afterwards is still answered."""
        if self._room is not None:
            self._room.close()

    def failure_exception(self) -> None:
        """Raise why the request failed.

        Raises:
            TransferFailed: Always.
        """
        reason = self._reason()
        self.conclude_state = FAILED
        if not reason and self._room is not None:
            self._room.abort("another rank of this server failed the request")
        raise TransferFailed(self.bootstrap_room, reason)

    @property
    def failed(self) -> bool:
        """Whether this rank's part has failed."""
        return bool(self._failure) or (self._room is not None and self._room.reason is not None)

    def _reason(self) -> str:
        if self._failure:
            return self._failure
        reason = None if self._room is None else self._room.reason
        return "" if reason is None else str(reason)

    def _conclude(self, state: int) -> int:
        if state in (FAILED, SUCCESS):
            self.conclude_state = state
        return state
