"""What sending and receiving have in common: the reason of a failure, and what SGLang may see of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ._failure import TransferFailed

if TYPE_CHECKING:
    from statelink import Room

    from ._manager import Manager

__all__ = ["BOOTSTRAPPING", "FAILED", "SUCCESS", "TRANSFERRING", "WAITING", "Transfer"]

log = logging.getLogger("statelink.sglang")

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
"""SGLang's `KVPoll`, whose numbers are those of `statelink.Status`."""


class Transfer:
    """One request. Everything runs on the scheduler's thread, except that `fail` may be called from any thread.

    Args:
        manager: The scheduler's manager.
        room: SGLang's ``bootstrap_room``.
    """

    limit = ""
    """The variable with SGLang's time limit for this side."""

    def __init__(self, manager: Manager, room: Any) -> None:
        self.kv_mgr = manager
        self.bootstrap_room = room
        self.conclude_state: int | None = None
        """The final state that SGLang was told; ``None`` before."""
        self._room: Room | None = None
        self._tokens = 0
        """N: the tokens whose state is moved; 0 while it is not known."""
        self._failure = ""
        if not isinstance(room, int) or room < 1:
            self._failure = f"the request has the room {room!r}; a number above zero is needed"

    def fail(self, reason: str) -> None:
        """Give the request up. The first reason stays. Any thread."""
        self._failure = self._failure or reason
        self._give_up(self._failure)

    def _give_up(self, why: str) -> None:
        """Tell the other side that this one goes no further. Any thread."""
        if self._room is not None:
            self._room.abort(why)

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
        if not reason:
            self._give_up("another rank of this server failed the request")
        raise TransferFailed(self.bootstrap_room, reason)

    @property
    def failed(self) -> bool:
        """Whether this rank's part has failed."""
        return bool(self._failure) or (self._room is not None and self._room.reason is not None)

    def _reason(self) -> str:
        if self._failure:
            return self._failure
        reason = None if self._room is None else self._room.reason
        if reason is None:
            return ""
        return f"{reason}\nthe limit is {self.limit}" if reason.code == "room.deadline" else str(reason)

    def _conclude(self, state: int) -> int:
        if state in (FAILED, SUCCESS):
            self.conclude_state = state
        return state
