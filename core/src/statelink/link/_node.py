"""One link's parts, and what everything on its control thread shares."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from statelink.backend import RegionTable
from statelink.errors import ClosedError, PeerError, TransferError, WireError
from statelink.wire import write_handshake

from ._lanes import Lane
from ._loop import Loop
from ._order import Order
from ._status import ENDED

if TYPE_CHECKING:
    import pluggy

    from statelink.backend import Backend, Strategy
    from statelink.config import LinkConfig
    from statelink.state import Inventory
    from statelink.wire import Channel, Handshake, Message

    from ._rendezvous import Rendezvous
    from ._room import Room

__all__ = ["Node", "Role"]

log = logging.getLogger("statelink.link")

SPARE_SETUPS = 32
"""Most peers that may keep a call waiting that connects to them, before others have to wait for their connections."""
UNASKED_CHANGES = 4096
"""Rooms that are kept for `Node.take_changes` while nobody has called it yet: an engine may look at its rooms alone."""


class Role(Protocol):
    """What prefill and decode each do with messages and time. Runs on the control thread."""

    def handle(self, message: Message, address: str | None) -> None:
        """A message for this link; ``address`` is where its sender was dialled, if it was."""

    def beat(self, now: float, late: float) -> None:
        """Signs of life are due; ``late`` are seconds that this process did not run for since the last ones."""

    def close(self) -> None:
        """Say goodbye."""

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """The ranks of the other side: stage, age and when each was last heard. Any thread."""

    def snapshot(self) -> dict[str, str]:
        """Peers and how they stand. Any thread."""

    def load(self) -> dict[str, int]:
        """What waits, by kind. Any thread."""

    def busy(self) -> bool:
        """Whether transfers or drains are under way."""

    def knows(self, name: str) -> bool:
        """Whether a peer that dialled this link, by its link name, has introduced itself."""


class Node:
    """One link's parts: the control thread's loop, the sockets, the backend and the lanes.

    The control thread never calls anything that can block: backend calls go to lanes, whose jobs post their results
    back.

    Args:
        config: The link's configuration.
        channel: The sockets; owned by the control thread once it runs.
        backend: The backend object.
        card: Who this link is.
        strategies: Component to strategy.
        rendezvous: Where instances are found.
        hooks: Observers.
        rejected: Backends that ``auto`` passed over, and why.
        memory: Memory kind to what is known of its regions.
        closed: Called once the backend has been closed.
        explained: Adds to an error about memory that it leaves which setting of its allocator that may be due to.
        loop: The control thread's loop.
        make_lane: Makes a lane; see `Lane` for what it is given.
    """

    def __init__(
        self,
        config: LinkConfig,
        channel: Channel,
        backend: Backend,
        card: Handshake,
        strategies: Mapping[str, Strategy],
        rendezvous: Rendezvous,
        hooks: pluggy.PluginManager,
        *,
        rejected: Mapping[str, str] | None = None,
        memory: Mapping[str, Mapping[str, Any]] | None = None,
        closed: Callable[[], object] = lambda: None,
        explained: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        loop: Loop | None = None,
        make_lane: Callable[[str, int, int, Order], Lane] = Lane,
    ) -> None:
        self.config = config
        self.channel = channel
        self.backend = backend
        self.card = card
        self.introduction = write_handshake(card)
        self.strategies = strategies
        self.rendezvous = rendezvous
        self.rejected = dict(rejected or {})
        self.memory = dict(memory or {})
        self.regions = RegionTable(card.inventory.regions, backend.name)
        self.rooms: dict[int, Room] = {}
        self.lock = threading.Lock()
        """Guards ``rooms``, the one thing that callers' threads write."""
        order = Order()
        limits = backend.capabilities
        serial = not limits.thread_safe
        self.movers = make_lane("statelink-move", 1 if serial else config.threads, limits.most_stalled or 0, order)
        # Connecting may take seconds, and fencing must not wait for it or for a copy: each has threads of its own,
        # unless the backend wants one call at a time.
        self.setup = self.movers if serial else make_lane("statelink-setup", 2, SPARE_SETUPS, order)
        self.fences = self.movers if serial else make_lane("statelink-fence", 1, 0, order)
        self.verifiers = make_lane("statelink-verify", config.threads, 0, order)
        self.cards = make_lane("statelink-cards", 1, 0, order)
        self.role: Role
        self._hooks = hooks
        self._closed = closed
        self._explained = explained
        self._changes: deque[Room] = deque()
        self._most_changes = UNASKED_CHANGES
        self._changes_dropped = 0
        self._pushes = 0
        self._any_change = threading.Event()
        self._due_beat = 0.0
        self._loop = loop or Loop()
        self._process = os.getpid()

    @property
    def name(self) -> str:
        """This link's name."""
        return self.card.link

    @property
    def inventory(self) -> Inventory:
        """What this rank holds."""
        return self.card.inventory

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the link: none of its threads is here. Any thread."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse a call in a forked child, before it takes a lock that a thread of the parent may have held.

        Raises:
            ClosedError: This is a forked child.
        """
        if self.forked:
            raise ClosedError(
                "the link is another process's",
                cause=f"process {self._process} opened it, and this one was forked from that",
                hint="open a link in each process, after the fork",
                code="closed.forked",
                link=self.name,
            )

    def start(self) -> None:
        """Start the control thread."""
        self.channel.watch(self._loop.fileno())
        self.channel.knows = self.role.knows
        self._due_beat = self.now() + self.config.heartbeat
        self.after(self.config.heartbeat, self._beat)
        self._loop.start(self._receive, self.channel.close)

    def now(self) -> float:
        """Seconds on a clock that never goes back. Any thread."""
        return self._loop.now()

    def connect(self, card: Handshake) -> None:
        """Connect the backend to a peer. Blocks; for data threads.

        Raises:
            StatelinkError: What the backend says. Where its library registers memory no earlier, and refuses it, with
                the setting that this may be due to.
        """
        try:
            self.backend.connect(card.link, card.descriptor, card.inventory.regions)
        except TransferError as error:
            if error.reason.code != "backend.memory":
                raise
            with self._explained():
                raise

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the control thread, in order of posting. Callable from any thread; never blocks."""
        self._loop.post(job)

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run ``job`` on the control thread after some time. Control thread only."""
        self._loop.after(seconds, job)

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
            if len(self._changes) > self._most_changes:
                with contextlib.suppress(IndexError):  # taken meanwhile
                    self._changes.popleft()._changed = False
                    self._changes_dropped += 1

    def take_changes(self, timeout: float | None) -> list[Room]:
        """Rooms that changed since the last call; waits for one for up to ``timeout`` seconds. Any thread."""
        self._most_changes = max(UNASKED_CHANGES, 2 * self.config.max_rooms)
        self._any_change.wait(timeout)
        self._any_change.clear()  # before looking: a change from here on sets it again
        found = []
        while self._changes:
            room = self._changes.popleft()
            room._changed = False
            found.append(room)
        return found

    def hold_pushes(self, count: int, *, admitted: bool = False) -> bool:
        """Count pushes that are held from now on, or no longer (below zero); whether so many may be. Any thread."""
        with self.lock:
            if count > 0 and not admitted and self._pushes + count > self.config.max_pushes:
                return False
            self._pushes += count
            return True

    def load(self) -> dict[str, int]:
        """What waits in this link, by kind. Any thread."""
        lanes = {
            "moves": self.movers,
            "setups": self.setup,
            "fences": self.fences,
            "checks": self.verifiers,
            "handshakes": self.cards,
        }
        return {
            "pushes": self._pushes,
            **{name: lane.waiting for name, lane in lanes.items()},
            "changes": len(self._changes),
            "changes_dropped": self._changes_dropped,
        }

    def room_ended(self, room: Room) -> None:
        """Tell the observers."""
        try:
            self._hooks.hook.statelink_room_ended(report=room.report)
        except BaseException:
            log.exception("an observer of rooms failed")

    def forget(self, room: Room) -> None:
        """Free a room's id, if the room ended and its memory is quiet."""
        if room.status in ENDED and room.quiesced:
            with self.lock:
                if self.rooms.get(room.room) is room:
                    del self.rooms[room.room]

    def _receive(self, timeout: float | None) -> None:
        for message, address in self.channel.receive(timeout):
            self._loop.guard(self.role.handle, message, address)

    def _beat(self) -> None:
        now = self.now()
        late = now - self._due_beat
        self._due_beat = now + self.config.heartbeat
        self.after(self.config.heartbeat, self._beat)
        self.role.beat(now, late if late > self.config.heartbeat else 0.0)

    def stop(self, timeout: float) -> bool:
        """Say goodbye, end the threads and close the backend; whether all ended within ``timeout`` seconds each."""
        done = threading.Event()

        def goodbye() -> None:
            until = self.now() + timeout

            def again() -> None:
                if self.role.busy() and self.now() < until:
                    self.after(0.005, again)
                else:
                    self.role.close()
                    done.set()

            again()

        if not self._loop.alive:
            return True
        self.post(goodbye)
        done.wait(timeout + 5)
        self.movers.submit(("close",), self._close_backend)
        ended = self.movers.close(timeout)
        for lane in (self.setup, self.fences, self.verifiers, self.cards):
            ended = (lane is self.movers or lane.close(timeout)) and ended
        self.rendezvous.close()
        for strategy in {id(each): each for each in self.strategies.values()}.values():
            strategy.close()
        return self._loop.stop(timeout) and ended

    def _close_backend(self) -> None:
        try:
            self.backend.close()
        finally:
            self._closed()
