"""The memory that one side names for one room, and when it may be used again. Its states are a table.

This is the promise that an engine relies on: `RoomMemory.quiesced` is true only if nothing touches the memory, or if
somebody took the memory back without proof. What proves that nothing touches it is a question for each side:
`prefill/_in_flight.py` follows what may still read it, and `decode/_in_flight.py` what may still write to it.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from .runtime import Flag

__all__ = ["ROOM_MEMORY", "MemoryEvent", "MemoryState", "RoomMemory"]


class MemoryState(enum.Enum):
    """How the memory stands that one side has named for a room."""

    QUIET = "quiet"
    """Nothing touches it: the engine has named none, or there is proof."""
    NAMED = "named"
    """A thread of the engine has named some, and the control thread has yet to run the job that says which."""
    IN_USE = "in use"
    """A transfer, a hook or a peer may touch it."""
    TAKEN_BACK = "taken back"
    """The engine uses it again, and there is no proof."""


class MemoryEvent(enum.Enum):
    """What happens to the memory of a room."""

    NAMED = "the engine names memory"
    HEARD = "the control thread has run the jobs of all calls that named memory"
    PROVEN = "nothing touches it any more"
    TAKEN_BACK = "the engine takes it back without proof"


_S, _E = MemoryState, MemoryEvent
ROOM_MEMORY: dict[MemoryState, dict[MemoryEvent, MemoryState]] = {
    _S.QUIET: {_E.NAMED: _S.NAMED},
    # Nothing is proven of memory that the control thread has not heard of.
    _S.NAMED: {_E.HEARD: _S.IN_USE, _E.TAKEN_BACK: _S.TAKEN_BACK},
    _S.IN_USE: {_E.NAMED: _S.NAMED, _E.PROVEN: _S.QUIET, _E.TAKEN_BACK: _S.TAKEN_BACK},
    # A room is taken back after its end only. Memory that a call names meanwhile is named in vain.
    _S.TAKEN_BACK: {_E.PROVEN: _S.QUIET},
}
"""What follows a state. An event that a state does not list changes nothing."""


class RoomMemory:
    """The state of the memory that one side named for a room.

    The engine's threads name memory and take it back. The control thread hears of what was named, and finds the proof.
    Every property may be read from any thread.

    Attributes:
        state: How the memory stands.
        taken_back: Whether it was ever taken back without proof.
    """

    # Every room begins with these values. They are attributes of the class, so that the engine's thread, which opens
    # the room, has nothing to set.
    state = MemoryState.QUIET
    taken_back = False
    _unheard = 0
    """Calls that named memory, and whose job has not run on the control thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler or a `__del__` may call the link meanwhile
        """Guards the state."""
        self._quiesced = Flag(True)

    @property
    def quiesced(self) -> bool:
        """Whether the memory may be used again."""
        return self.state is MemoryState.QUIET or self.state is MemoryState.TAKEN_BACK

    @property
    def proven(self) -> bool:
        """Whether nothing touches the memory, for certain."""
        return self.state is MemoryState.QUIET

    def wait(self, timeout: float | None) -> bool:
        """Block until the memory may be used again. Returns whether it may. A thread of the engine."""
        return self._quiesced.wait(timeout)

    def name(self) -> None:
        """Note that the engine names memory. A thread of the engine, before it posts the job that says which."""
        with self._lock:
            self._unheard += 1
            self._step(MemoryEvent.NAMED)

    def heard(self) -> None:
        """Note that the job of one such call runs. Control thread."""
        with self._lock:
            self._unheard -= 1
            if not self._unheard:
                self._step(MemoryEvent.HEARD)

    def prove_quiesced(self) -> bool:
        """Note that nothing touches the memory of which the control thread has heard. Control thread.

        Returns:
            Whether the memory may be used again because of it.
        """
        if self.state is MemoryState.QUIET:  # read without the lock: a call that names memory now comes after this one
            return False
        with self._lock:
            before = self.quiesced
            if not self._unheard:
                self._step(MemoryEvent.PROVEN)
            return self.quiesced and not before

    def take_back(self, touches: Callable[[], bool]) -> bool:
        """Count the memory as quiesced without proof, unless this process itself may touch it. Any thread.

        Args:
            touches: Whether code of this process may touch the memory.

        Returns:
            Whether the memory is taken back, by this call or an earlier one.
        """
        with self._lock:
            if not self.quiesced and not touches():
                self.taken_back = True
                self._step(MemoryEvent.TAKEN_BACK)
            return self.taken_back

    def _step(self, event: MemoryEvent) -> None:
        state = ROOM_MEMORY[self.state].get(event)
        if state is None:
            return
        self.state = state
        if state is MemoryState.NAMED:
            self._quiesced.clear()
        elif state is not MemoryState.IN_USE:
            self._quiesced.set()
