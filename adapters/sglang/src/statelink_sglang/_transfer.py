"""What sending and receiving have in common: the reason of a failure, and what SGLang may see of it."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from ._failure import VOTED, TransferFailed

if TYPE_CHECKING:
    from statelink import Room, Status

    from ._manager import Manager

__all__ = ["BOOTSTRAPPING", "FAILED", "SUCCESS", "TRANSFERRING", "WAITING", "Transfer"]

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
"""SGLang's `KVPoll`, whose numbers are those of `statelink.Status`."""


class Transfer:
    """One request. Everything runs on the scheduler's thread, except where a method says otherwise.

    Args:
        manager: The scheduler's manager.
        room: SGLang's ``bootstrap_room``.
    """

    limit = ""
    """The variable with SGLang's time limit for this side."""

    conclude_state: int | None = None
    """The final state that SGLang was told; ``None`` before."""
    _room: Room | None = None
    _given_up = ""
    """Why the other side is to be told that this one goes no further, if it is. Set before `_room` is read, since who
    sets `_room` on another thread reads this afterwards."""
    _tokens = 0
    """N: the tokens whose state is moved; 0 while it is not known."""
    _failure = ""
    _settled: Status | None = None
    """The room's status for which `_shown` is the answer to `poll`; ``None`` if `poll` has to work it out again."""
    _shown = BOOTSTRAPPING
    _again: float | None = None
    """Time of `time.monotonic` at which `poll` works its answer out again in any case; ``None`` for never."""

    def __init__(self, manager: Manager, room: Any) -> None:
        self.kv_mgr = manager
        self.bootstrap_room = room

    def poll(self) -> int:
        """How far the request is, as the queue in which it is may see it.

        SGLang asks for every request in each round of its loop, and mostly nothing has happened. So the answer is
        worked out once for each status of the room.
        """
        room = self._room
        if room is not None and room.status is self._settled:
            again = self._again
            if again is None or monotonic() < again:
                return self._shown
        return self._look()

    def _look(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        room = self._room
        status = None if room is None else room.poll()
        self._again = None
        state = self._state(status)
        if state in (FAILED, SUCCESS):
            self.conclude_state = state
        elif not self._failure and status != FAILED:
            self._settled, self._shown = status, state
        return state

    def _state(self, status: Status | None) -> int:
        """What SGLang may see of the request at a status of its room. If that depends on time, too, sets `_again`."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """Give the request up. The first reason stays. Any thread."""
        self._failure = self._failure or reason
        self._settled = None
        self._give_up(self._failure)

    def _give_up(self, why: str) -> None:
        """Tell the other side that this one goes no further. Any thread."""
        self._given_up = self._given_up or why
        room = self._room
        if room is not None:
            room.abort(why)

    def abort(self) -> None:
        """SGLang gives the request up: a client has gone, or aborted it. Does not block."""
        self.fail("SGLang aborted the request")

    def clear(self) -> None:
        """SGLang is done with the request. What SGLang asks for afterwards is still answered."""
        if self._room is None:
            self._given_up = self._given_up or "SGLang gave the request up"
        room = self._room
        if room is not None:
            room.close()

    def failure_exception(self) -> None:
        """Raise why the request failed.

        Raises:
            TransferFailed: Always.
        """
        reason = self._reason()
        self.conclude_state, self._settled = FAILED, None
        if not reason:
            self._give_up(VOTED)
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
