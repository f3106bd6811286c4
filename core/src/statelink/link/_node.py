"""The control thread of one link, and what everything on it shares."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from statelink.errors import PeerError, WireError
from statelink.wire import write_card

from ._lanes import Lane
from ._mover import RegionTable
from ._status import ENDED

if TYPE_CHECKING:
    import pluggy

    from statelink.backend import Backend, Strategy
    from statelink.state import Inventory
    from statelink.wire import Card, Channel, Message

    from ._config import LinkConfig
    from ._rendezvous import Rendezvous
    from ._room import Room

__all__ = ["Node", "Role"]

log = logging.getLogger("statelink.link")


class Role(Protocol):
    """What prefill and decode each do with messages and time. Runs on the control thread."""

    def handle(self, message: Message, address: str | None) -> None:
        """A message for this link; ``address`` is where its sender was dialled, if it was."""

    def beat(self, now: float, late: float) -> None:
        """Signs of life are due; ``late`` are seconds that this process did not run for since the last ones."""

    def close(self) -> None:
        """Say goodbye."""

    def busy(self) -> bool:
        """Whether transfers or drains are under way."""


class Node:
    """One link's control thread: sockets, timers, and jobs posted by other threads.

    The thread never calls anything that can block: backend calls go to lanes, whose jobs post their results back.

    Args:
        config: The link's configuration.
        channel: The sockets; owned by the control thread once it runs.
        backend: The backend object.
        card: Who this link is.
        strategies: Component to strategy.
        rendezvous: Where instances are found.
        hooks: Observers.
    """

    def __init__(
        self,
        config: LinkConfig,
        channel: Channel,
        backend: Backend,
        card: Card,
        strategies: Mapping[str, Strategy],
        rendezvous: Rendezvous,
        hooks: pluggy.PluginManager,
    ) -> None:
        self.config = config
        self.channel = channel
        self.backend = backend
        self.card = card
        self.introduction = write_card(card)
        self.strategies = strategies
        self.rendezvous = rendezvous
        self.regions = RegionTable(card.inventory.regions)
        self.rooms: dict[int, Room] = {}
        self.lock = threading.Lock()
        """Guards ``rooms``, the one thing that callers' threads write."""
        serial = not backend.capabilities.thread_safe
        self.movers = Lane("statelink-move", 1 if serial else config.threads)
        # Connecting may take seconds, and fencing must not wait for it or for a copy: each has threads of its own,
        # unless the backend wants one call at a time.
        self.setup = self.movers if serial else Lane("statelink-setup", 2)
        self.fences = self.movers if serial else Lane("statelink-fence", 1)
        self.role: Role
        self._hooks = hooks
        self._posted: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changes: deque[Room] = deque()
        self._any_change = threading.Event()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        self._awake = False
        self._stop = False
        self._due_beat = 0.0
        self._thread = threading.Thread(target=self._run, name="statelink-control", daemon=True)

    @property
    def name(self) -> str:
        """This link's name."""
        return self.card.link

    @property
    def inventory(self) -> Inventory:
        """What this rank holds."""
        return self.card.inventory

    def start(self) -> None:
        """Start the control thread."""
        self.channel.watch(self._wakee.fileno())
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the control thread, in order of posting. Callable from any thread; never blocks."""
        self._posted.append(job)
        if not self._awake:
            self._awake = True
            # Full: it will wake up anyway. Closed: nobody is left to wake.
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run ``job`` on the control thread after some time. Control thread only."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), job))

    def send(self, message: Message, address: str | None = None) -> bool:
        """Queue a message; whether that was possible. One that was not is noticed by the peer's silence."""
        try:
            self.channel.send(message, address)
        except PeerError as error:
            log.debug("%s", error)
            return False
        except WireError as error:
            log.error("%s", error)
            return False
        return True

    def changed(self, room: Room) -> None:
        """Note that a room changed, once until somebody asks."""
        if not room._changed:
            room._changed = True
            self._changes.append(room)
            self._any_change.set()

    def take_changes(self, timeout: float | None) -> list[Room]:
        """Rooms that changed since the last call; waits for one for up to ``timeout`` seconds. Any thread."""
        self._any_change.wait(timeout)
        self._any_change.clear()  # before looking: a change from here on sets it again
        found = []
        while self._changes:
            room = self._changes.popleft()
            room._changed = False
            found.append(room)
        return found

    def room_ended(self, room: Room) -> None:
        """Tell the observers."""
        try:
            self._hooks.hook.statelink_room_ended(report=room.report)
        except Exception:
            log.exception("an observer of rooms failed")

    def forget(self, room: Room) -> None:
        """Free a room's id, if the room ended and its memory is quiet."""
        if room.status in ENDED and room.quiesced:
            with self.lock:
                if self.rooms.get(room.room) is room:
                    del self.rooms[room.room]

    def _run(self) -> None:
        self._due_beat = time.monotonic() + self.config.heartbeat
        self.after(self.config.heartbeat, self._beat)
        while not self._stop:
            timeout = self._timers[0][0] - time.monotonic() if self._timers else None
            self._guard(self._receive, 0.0 if self._posted else timeout)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._guard(heapq.heappop(self._timers)[2])
        self._guard(self.channel.close)

    def _receive(self, timeout: float | None) -> None:
        for message, address in self.channel.receive(timeout):
            self._guard(self.role.handle, message, address)
        # In this order: who posts after the byte was taken and before the flag is cleared is among the jobs run next;
        # who posts later sends a byte. The other way round, a byte could be taken whose flag stays up for good.
        with contextlib.suppress(BlockingIOError):
            self._wakee.recv(4096)
        self._awake = False
        while self._posted:
            self._guard(self._posted.popleft())

    def _beat(self) -> None:
        now = time.monotonic()
        late = now - self._due_beat
        self._due_beat = now + self.config.heartbeat
        self.after(self.config.heartbeat, self._beat)
        self.role.beat(now, late if late > self.config.heartbeat else 0.0)

    @staticmethod
    def _guard(job: Callable[..., None], *args: Any) -> None:
        """No message, timer or job may end the control thread."""
        try:
            job(*args)
        except Exception:
            log.exception("a job of the control thread failed")

    def stop(self, timeout: float) -> bool:
        """Say goodbye, end the threads and close the backend; whether all ended within ``timeout`` seconds each."""
        done = threading.Event()

        def goodbye() -> None:
            until = time.monotonic() + timeout

            def again() -> None:
                if self.role.busy() and time.monotonic() < until:
                    self.after(0.005, again)
                else:
                    self.role.close()
                    done.set()

            again()

        if not self._thread.is_alive():
            return True
        self.post(goodbye)
        done.wait(timeout + 5)
        self.movers.submit(("close",), self.backend.close)
        ended = self.movers.close(timeout)
        for lane in (self.setup, self.fences):
            ended = (lane is self.movers or lane.close(timeout)) and ended
        self.rendezvous.close()

        def last() -> None:
            self._stop = True

        self.post(last)
        self._thread.join(timeout)
        self._waker.close()
        self._wakee.close()
        return ended and not self._thread.is_alive()
