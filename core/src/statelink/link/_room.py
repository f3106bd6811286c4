"""The engine's handle of one room, on either side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from statelink._arguments import duration, shown, switch, wait_time, words
from statelink.errors import RoomError

from ._status import ENDED, Status

if TYPE_CHECKING:
    import threading

    from statelink.backend import RoomReport
    from statelink.errors import Reason

    from ._room_state import RoomState

__all__ = ["Room"]


class Room:
    """One request on one side: the part that sending and receiving have in common.

    Thread-safe. Properties are plain attribute reads and never block. The control thread writes what they read, except
    that the engine's own call makes `quiesced` false when it names memory.
    """

    _lock: threading.RLock
    """Admits one thread of the engine at a time to calls that name memory."""

    def __init__(self, state: RoomState) -> None:
        self._state = state

    @property
    def room(self) -> int:
        """The non-zero 64-bit id that both sides use for the request."""
        return self._state.room

    @property
    def tokens(self) -> int | None:
        """N: positions of the request; ``None`` while this side does not know."""
        return self._state.tokens

    @property
    def prefix(self) -> int | None:
        """P: positions that decode already holds; ``None`` while this side does not know."""
        return self._state.prefix

    @property
    def content(self) -> bytes | None:
        """The content of the request that this side's engine has stated; ``None`` while it has stated none."""
        return self._state.content or None

    @property
    def status(self) -> Status:
        """How far the room is."""
        return self._state.status

    def poll(self) -> Status:
        """The same as `status`, for a scheduler's loop: it never blocks.

        Raises:
            ClosedError: This is a forked child, where the status stays what it was.
        """
        state = self._state
        if state.context.forked:
            state.context.check_process()
        return state.status

    @property
    def reason(self) -> Reason | None:
        """Why the room failed: the first reason, from whichever side; ``None`` while it has not failed."""
        return self._state.reason

    @property
    def quiesced(self) -> bool:
        """Whether memory that this side named for the room may be reused.

        True before anything was named, false while a transfer may touch it, true again once every transfer has ended
        or was fenced. A failed room may quiesce later than it ends. A timeout never makes a room quiesced, unless the
        operator set 'take_back_after'. `taken_back` says whether it is true by somebody's choice, without proof.
        """
        return self._state.memory.quiesced

    @property
    def taken_back(self) -> bool:
        """Whether memory was taken back without proof, by `take_back` or by the operator's 'take_back_after'."""
        return self._state.memory.taken_back

    def wait(self, timeout: float | None = None, *, quiesced: bool = False) -> Status:
        """Block until the room ended, and with ``quiesced`` also until its memory may be reused.

        Args:
            timeout: Seconds to wait at most; ``None`` waits for as long as it takes.
            quiesced: Also wait for `quiesced`.

        Returns:
            The status at the end of the wait.

        Raises:
            RoomError: ``timeout`` is no number, or ``quiesced`` no bool.
        """
        seconds = None if timeout is None else wait_time(timeout)
        quiesced = quiesced if type(quiesced) is bool else switch(quiesced, "'quiesced'", error=RoomError)
        self._state.context.check_process()
        return self._state.wait(seconds, quiesced=quiesced)

    def check(self) -> None:
        """Return if the room succeeded: every promised byte is visible at the destination. Does not block.

        Raises:
            RoomError: The room failed; the reason says why. Or it has not ended (``room.open``).
        """
        state = self._state
        status = state.status
        if status is Status.FAILED and state.reason is not None:
            raise RoomError.of(state.reason)
        if status is not Status.SUCCEEDED:
            state.context.check_process()
            cause = f"it is {status}, and waits for {state.waits_for() or 'its end'}"
            refusal = state.refusal()
            raise RoomError.of(
                state.reason_for(
                    "room.open",
                    "a room has not ended",
                    f"{cause}; {refusal}" if refusal else cause,
                    "call check() once wait() or poll() says that it has; wait() returns early at its timeout",
                )
            )

    def abort(self, why: str = "the engine aborted it") -> None:
        """Give the room up, on both sides. Does not block; does nothing once the room has ended."""
        state = self._state
        if state.context.forked:
            state.context.check_process()
        if state.status not in ENDED:
            said = words(why)
            state.context.post_job(state.abort, said)

    def take_back(self, why: str = "the engine needs it") -> None:
        """Take the memory of the room back, although nobody has proven that nothing touches it. Does not block.

        For an engine that uses the memory of a failed request again whatever happens. The room is aborted if it has not
        ended. Then `quiesced` and `taken_back` are true, the id may be used again, and the room no longer counts for
        'max_rooms'. All of this holds when this call returns, unless the room had not ended, or a strategy's hook is at
        work on the memory in this process: then it holds soon. The link logs and counts it.

        On decode, bytes of this request may still be written to the memory while another request uses it. On prefill,
        bytes of another request may be sent in place of this one's. Decode's room has failed, so nobody uses them.
        Only the engine's memory is taken back: space in staging rings stays quarantined until there is proof. Until
        then, the link cannot be suspended, and `Link.close` returns false. It does nothing if the memory has quiesced.

        Args:
            why: For the log, and for the reason of a room that had not ended.
        """
        self._state.context.check_process()
        self._state.take_back(words(why))

    def extend(self, seconds: float) -> None:
        """Set a new deadline: the room may take ``seconds`` from this call. Does not block.

        An engine that has its own time limits calls this as often as it likes: while the request waits in a queue, or
        to count the time from `Receiving.accept` or from the first push. It does nothing once the room has ended. Each
        side has its own deadline.

        Args:
            seconds: Above zero. The deadline may become earlier or later by it.

        Raises:
            RoomError: It is no number above zero; the deadline stays what it was.
        """
        state = self._state
        state.context.check_process()
        try:
            more = duration(seconds, "the time by which a room is extended")
        except RoomError as error:
            raise RoomError.of(state.reason_for(error.code, error.reason.what, error.reason.cause)) from None
        state.context.post_job(state.extend, more)

    def close(self) -> None:
        """Abort the room, unless it has ended. Does not block, and may be called twice."""
        state = self._state
        if state.status not in ENDED and not state.context.forked:
            self.abort("the engine closed it before its end")

    @property
    def nbytes(self) -> int:
        """Bytes that this side moved so far (prefill), or that arrived (decode, once the room has succeeded)."""
        return self._state.nbytes

    @property
    def report(self) -> RoomReport:
        """What was measured of the room so far."""
        return self._state.report

    def __repr__(self) -> str:
        quiet = "" if self.quiesced else ", memory in use"
        return f"<{type(self).__name__} room {self.room} {self.status.name.lower()}{quiet}>"

    def _check_given(self, items: Any, ready: Any, code: str) -> None:
        """Refuse items that are no mapping, and a ready event without ``query()``."""
        if not isinstance(items, Mapping):
            what = f"items are given as {type(items).__name__}"
            raise RoomError.of(self._state.reason_for(code, what, "a dict of indices by component is expected"))
        if ready is not None and not callable(getattr(ready, "query", None)):
            what = f"the ready event is {shown(ready)}"
            raise RoomError.of(self._state.reason_for(code, what, "something with a method query() is expected"))
