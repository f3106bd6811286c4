"""What an engine holds of one request, on either side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from statelink.backend import Moved, RoomReport
from statelink.errors import Reason, RoomError

from ._standing import Party, explained
from ._status import ENDED, Status, follows

if TYPE_CHECKING:
    from ._node import Node

__all__ = ["Ready", "Room"]


class Ready(Protocol):
    """What guards memory: anything with ``query()``, such as a device event."""

    def query(self) -> bool:
        """Whether the memory may be touched. Must not block; called on the control thread."""


class Room:
    """One request on one side: the part that sending and receiving have in common.

    Properties are plain attribute reads, never block, and may be read from any thread. Only the link's control thread
    changes them.
    """

    def __init__(self, node: Node, room: int, tokens: int, deadline: float | None, attempt: int = 0) -> None:
        self._node = node
        self._room = room
        self._attempt = attempt
        self._tokens = tokens
        self._status = Status.BOOTSTRAPPING
        self._reason: Reason | None = None
        self._quiesced = True
        self._prefix: int | None = None
        self._ended = threading.Event()
        self._quiet = threading.Event()
        self._quiet.set()
        self._changed = False
        self._watching = False
        self._opened = node.now()
        self._met: float | None = None
        self._over: float | None = None
        self._deadline = self._opened + (node.config.deadline if deadline is None else deadline)
        self._moved: dict[str, Moved] = {}
        self._chunks = 0

    @property
    def room(self) -> int:
        """The non-zero 64-bit id that both sides use for the request."""
        return self._room

    @property
    def attempt(self) -> int:
        """Which use of the id this is, as the engines of both sides say."""
        return self._attempt

    @property
    def _key(self) -> tuple[int, int]:
        """The id and the attempt: what both sides call this use."""
        return self._room, self._attempt

    @property
    def tokens(self) -> int:
        """N: positions of the request."""
        return self._tokens

    @property
    def prefix(self) -> int | None:
        """P: positions that decode already holds; ``None`` while this side does not know."""
        return self._prefix

    @property
    def status(self) -> Status:
        """How the room stands."""
        return self._status

    def poll(self) -> Status:
        """The same as `status`, for a scheduler's loop: it never blocks.

        Raises:
            ClosedError: This is a forked child, where the status stays what it was.
        """
        self._node.check_process()
        return self._status

    @property
    def reason(self) -> Reason | None:
        """Why the room failed: the first reason, wherever it arose; ``None`` while it has not."""
        return self._reason

    @property
    def quiesced(self) -> bool:
        """Whether memory that this side named for the room may be reused.

        True before anything was named, false while a transfer may touch it, true again once every transfer has ended
        or was fenced. It may come later than the end of a failed room, and never comes by a timeout.
        """
        return self._quiesced

    def wait(self, timeout: float | None = None, *, quiesced: bool = False) -> Status:
        """Block until the room ended, and with ``quiesced`` also until its memory may be reused.

        Args:
            timeout: Seconds to wait at most; the status then says how far it came.
            quiesced: Also wait for `quiesced`.
        """
        self._node.check_process()
        until = None if timeout is None else time.monotonic() + timeout
        if self._ended.wait(timeout) and quiesced:
            self._quiet.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self._status

    def check(self) -> None:
        """Return if the room succeeded: every promised byte is there. Does not block.

        Raises:
            RoomError: The room failed; the reason says why. Or it has not ended (``room.open``).
        """
        status = self._status
        if status is Status.FAILED and self._reason is not None:
            raise RoomError.of(self._reason)
        if status is not Status.SUCCEEDED:
            self._node.check_process()
            raise RoomError.of(
                self._reason_for(
                    "room.open",
                    "a room has not ended",
                    f"it is {status}, and waits for {self._missing() or 'its end'}",
                    "call check() once wait() or poll() says that it has; wait() returns early at its timeout",
                )
            )

    def abort(self, why: str = "the engine aborted it") -> None:
        """Give the room up, on both sides. Does not block; does nothing once the room has ended."""
        self._node.check_process()
        self._node.post(lambda: self._abort(str(why)))

    def close(self) -> None:
        """Let go of the room; one that has not ended is aborted. Does not block, and may be called twice."""
        if not self._node.forked:
            self.abort("the engine closed it before its end")

    @property
    def report(self) -> RoomReport:
        """What was measured of the room so far."""
        now = self._over or self._node.now()
        met = self._met or now
        return RoomReport(
            room=self._room,
            role=self._node.config.role,
            backend=self._node.backend.name,
            status=self._status.name.lower(),
            reason=self._reason,
            moved=dict(self._moved),
            tokens=self._tokens,
            prefix=self._prefix or 0,
            chunks=self._chunks,
            waited=met - self._opened,
            transferred=now - met,
            ended=None if self._over is None else time.time() - (self._node.now() - self._over),
            transports=self._transports(),
        )

    def __repr__(self) -> str:
        quiet = "" if self._quiesced else ", memory in use"
        return f"<{type(self).__name__} room {self._room} {self._status.name.lower()}{quiet}>"

    # What follows belongs to the control thread.

    def _set(self, status: Status) -> bool:
        """Take a step forward; whether it was one."""
        if not follows(self._status, status):
            return False
        if self._met is None and status > Status.BOOTSTRAPPING:
            self._met = self._node.now()
        if status in ENDED:
            self._over = self._node.now()
        self._status = status
        if status in ENDED:
            self._ended.set()
            self._node.room_ended(self)
        self._node.changed(self)
        return True

    def _set_quiesced(self, quiet: bool) -> None:
        if quiet == self._quiesced:
            return
        self._quiesced = quiet
        if quiet:
            self._quiet.set()
            self._node.changed(self)
        else:
            self._quiet.clear()

    def _fail(self, reason: Reason) -> bool:
        """End in failure, if it has not ended; the first reason is the one that stays."""
        if self._status in ENDED:
            return False
        self._reason = self._explained(reason).clipped()
        return self._set(Status.FAILED)

    def _explained(self, reason: Reason, *others: Party) -> Reason:
        """The reason, with how the room stands, unless it arose on the other side, which has said so already."""
        if reason.diagnostics:
            return reason
        node = self._node
        stands = {
            "room": str(self._room),
            "backend": node.backend.name,
            "side": f"{node.config.role} rank {node.inventory.rank}",
            "status": self._status.name.lower(),
        }
        return explained(reason, stands, [*self._parties(), *others], self._missing(), node.now())

    def _parties(self) -> list[Party]:
        """The ranks of the other side that the room has to do with."""
        raise NotImplementedError

    def _transports(self) -> dict[str, str]:
        """Per peer, what carries the bytes, as far as it is known. Any thread."""
        raise NotImplementedError

    def _missing(self) -> str:
        """What the room still waits for, in words."""
        raise NotImplementedError

    def _abort(self, why: str) -> None:
        raise NotImplementedError

    def _held(self) -> tuple[int, str]:
        """Bytes of this side's memory that were named for the room, and what they wait for. Any thread."""
        raise NotImplementedError

    def _bytes_of(self, component: str, items: int) -> int:
        buffers = self._node.inventory.component(component).buffers
        return items * sum(buffer.layout.nbytes for buffer in buffers if buffer.count)

    def _reason_for(self, code: str, what: str, cause: str = "", hint: str = "", **who: object) -> Reason:
        named = {"room": str(self._room), "backend": self._node.backend.name}
        if self._attempt:
            named["attempt"] = str(self._attempt)
        named.update({key: str(value) for key, value in who.items() if value is not None})
        return Reason(code, what, named, cause, hint)

    def _check_given(self, items: Any, ready: Any, code: str) -> None:
        """That an engine's items and event are such."""
        if not isinstance(items, Mapping):
            what = f"items are given as {type(items).__name__}"
            raise RoomError.of(self._reason_for(code, what, "a dict of indices by component is expected"))
        if ready is not None and not callable(getattr(ready, "query", None)):
            what = f"the ready event is {ready!r:.80}"
            raise RoomError.of(self._reason_for(code, what, "something with a method query() is expected"))

    def _is_ready(self, ready: Ready | None, again: Callable[[], None]) -> bool:
        """Whether the engine's event lets memory be touched; if not, ``again`` is called a little later.

        An event that raises fails the room.
        """
        if ready is None:
            return True
        try:
            if ready.query():
                return True
        except BaseException as error:
            cause = f"its query() raised {type(error).__name__}: {error}".removesuffix(": ")
            self._broken(self._reason_for("room.ready", "the engine's ready event failed", cause))
            return False
        if not self._watching:
            self._watching = True

            def look() -> None:
                self._watching = False
                again()

            self._node.after(READY_POLL, look)
        return False

    def _broken(self, reason: Reason) -> None:
        raise NotImplementedError


READY_POLL = 0.0005
"""Seconds between looks at an engine's event; an event that is ready at once costs one call."""
