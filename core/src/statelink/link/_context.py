"""The parts of a link that are fixed when it opens, and that all its other parts use. None of them knows a room."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from statelink._logs import logger
from statelink.backend import EventDriven, Fence, Fencing, Landing, RegionTable
from statelink.errors import ClosedError, TransferError
from statelink.wire import write_handshake

from ._ready import ReadyEvents
from .peers import Connections, HandshakeReader
from .runtime import KeyedExecutor, Loop, MakeExecutor, Workers

if TYPE_CHECKING:
    import pluggy

    from statelink.backend import Backend, Strategy
    from statelink.config import LinkConfig
    from statelink.pointers import Reader
    from statelink.wire import Channel, Handshake

    from .peers import Rendezvous

__all__ = ["Context"]

log = logger("statelink.link")


class Context:
    """One link's parts: the configuration, the sockets, the backend, the control thread's loop and the workers.

    The control thread calls nothing that may block: data threads do that.

    Args:
        config: The link's configuration.
        channel: The sockets. The control thread owns them while it runs.
        backend: The backend object.
        handshake: This link's handshake.
        strategies: Component to strategy.
        rendezvous: Finds the addresses of instances.
        hooks: Calls the observers.
        rejected: Backends that ``auto`` passed over, and why.
        memory: Memory kind to what is known of its regions.
        closed: Called once the backend has been closed, on a data thread.
        explained: A context manager that adds to an error about memory which allocator setting may be the cause.
        start: Makes a backend object that has registered the memory, and the handshake with its descriptor. Called
            with the number of earlier registrations. ``None`` if the registration cannot be suspended.
        begin: Each thread of the link calls it first: it chooses the device of the link's memory. Never raises.
        readers: By memory kind of devices: what reads such memory from the host.
        flush: Makes peers' writes visible to the devices of the link's memory; ``None`` where nothing has to be done.
        loop: The control thread's loop.
        make_executor: Makes an executor; see `KeyedExecutor` for what it is given.

    Attributes:
        name: This link's name. It never changes.
        inventory: This rank's components and regions.
        announcement: The handshake, encoded.
        regions: The region table of this rank, for checks.
        fencing: The backend, if this side can itself revoke a grant; ``None`` if only the writer can stop its writes.
        landing: The backend, if this side can itself see when bytes have landed; ``None`` if only the writer knows.
        events: The engine's ready events. Control thread.
        workers: The data threads.
        connections: The connections of the backend. Control thread.
        reader: Reads the handshakes of peers. Control thread.
        now: Seconds on a clock that never goes back. Any thread.
        post_job: `Loop.post_job`.
        after: `Loop.after`. Control thread.
        forked: Whether this process was forked from the one that opened the link, so that it has none of the link's
            threads. Any thread.
    """

    def __init__(
        self,
        config: LinkConfig,
        channel: Channel,
        backend: Backend,
        handshake: Handshake,
        strategies: Mapping[str, Strategy],
        rendezvous: Rendezvous,
        hooks: pluggy.PluginManager,
        *,
        rejected: Mapping[str, str] | None = None,
        memory: Mapping[str, Mapping[str, Any]] | None = None,
        closed: Callable[[], object] = lambda: None,
        explained: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        start: Callable[[int], tuple[Backend, Handshake]] | None = None,
        begin: Callable[[], None] = lambda: None,
        readers: Mapping[str, Reader] | None = None,
        flush: Callable[[], None] | None = None,
        loop: Loop | None = None,
        make_executor: MakeExecutor | None = None,
    ) -> None:
        self.config = config
        self.channel = channel
        self.backend = backend
        self.handshake = handshake
        self.name = handshake.link
        self.inventory = handshake.inventory
        self.announcement = write_handshake(handshake)
        self.strategies = strategies
        self.rendezvous = rendezvous
        self.hooks = hooks
        self.rejected = dict(rejected or {})
        self.memory = dict(memory or {})
        self.regions = RegionTable(handshake.inventory.regions, backend.name)
        self.fencing = _fencing(backend)
        self.landing = _landing(backend)
        self.loop = loop or Loop(begin)
        self.now, self.post_job, self.after = self.loop.now, self.loop.post_job, self.loop.after
        self.events = ReadyEvents(self.loop)
        self._give_loop(backend)
        make = make_executor or partial(KeyedExecutor, begin=begin)
        self.workers = Workers(self.loop, backend, config.threads, make)
        self.connections = Connections(backend, self.workers, explained)
        self.reader = HandshakeReader(channel, self.workers)
        self._begin = begin
        self.flush = flush
        self._readers = dict(readers or {})
        self._closed = closed
        self._start = start
        self._process = os.getpid()
        self.forked = False
        _opened.add(self)

    @property
    def quiet_within(self) -> float | None:
        """See `Link.quiet_within`. Any thread."""
        if self.fencing is not None:
            return self.config.liveness
        after = self.config.take_back_after
        return None if after is None else max(after, self.config.liveness)

    def reader_of(self, component: str) -> Reader | None:
        """What reads a component's memory from the host, if it lies on a device. Any thread."""
        buffers = self.inventory.component(component).buffers
        kinds = {self.inventory.regions[buffer.region].kind for buffer in buffers if buffer.count}
        return next((self._readers[kind] for kind in sorted(kinds) if kind in self._readers), None)

    def check_process(self) -> None:
        """Refuse a call in a forked child, before it takes a lock that a thread of the parent may have held.

        Raises:
            ClosedError: This is a forked child.
        """
        if self.forked:
            raise ClosedError(
                "the link belongs to another process",
                cause=f"process {self._process} opened it, and this one was forked from that",
                hint="open a link in each process, after the fork",
                code="closed.forked",
                link=self.name,
            )

    def tell(self, hook: str, **what: object) -> None:
        """Call a hook of observers. An error of theirs is logged. Any thread."""
        try:
            getattr(self.hooks.hook, hook)(**what)
        except Exception:
            log.exception("an observer failed in %s", hook)

    # The registration of memory.

    def deregister(self, timeout: float) -> None:
        """Close the backend, once no job uses it. Blocks; a thread of the engine.

        Raises:
            TransferError: After ``timeout`` seconds, the backend is still in use, or has not closed.
        """
        until = time.monotonic() + timeout
        while not self.workers.idle:
            if time.monotonic() > until:
                raise self._not_suspended("calls of the backend have not returned")
            time.sleep(0.002)
        failed: list[BaseException] = []

        def job() -> None:
            self._begin()
            try:
                self.backend.close()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=job, name="statelink-suspend", daemon=True)
        thread.start()
        thread.join(max(0.5, until - time.monotonic()))
        if thread.is_alive() or failed:
            raise self._not_suspended(repr(failed[0]) if failed else "closing the backend has not ended")

    def _not_suspended(self, cause: str) -> TransferError:
        return TransferError(
            "the memory cannot be unregistered", cause=cause, backend=self.backend.name, link=self.name
        )

    def register(self) -> tuple[Backend, Handshake]:
        """Register the memory with a new object of the backend. Blocks; a thread of the engine.

        Raises:
            StatelinkError: The backend's error, or that of the checks of memory.
        """
        assert self._start is not None
        return self._start(self.handshake.registration + 1)

    def discard(self, backend: Backend) -> None:
        """Close an object of the backend that `register` made and nobody uses. Blocks; a thread of the engine."""
        try:
            backend.close()
        except BaseException:
            log.exception("backend %s failed to close", backend.name)

    def use(self, backend: Backend, handshake: Handshake) -> None:
        """Use a new object of the backend. Control thread, while there is no connection and no job."""
        self.backend = backend
        self.handshake, self.inventory = handshake, handshake.inventory
        self.announcement = write_handshake(handshake)
        self.fencing, self.landing = _fencing(backend), _landing(backend)
        self._give_loop(backend)
        self.workers.use(backend)
        self.connections.use(backend)

    def _give_loop(self, backend: Backend) -> None:
        if isinstance(backend, EventDriven):
            backend.use_loop(self.loop.readers)

    def close(self, timeout: float) -> bool:
        """End the data threads, and close the backend, the rendezvous and the strategies.

        Blocks; called on the engine's thread that closes the link. Returns whether the threads of each executor ended
        within ``timeout`` seconds.
        """
        ended = self.workers.close(timeout, self._close_backend)
        self.rendezvous.close()
        for strategy in {id(each): each for each in self.strategies.values()}.values():
            strategy.close()
        return ended

    def _close_backend(self) -> None:
        try:
            self.backend.close()
        finally:
            self._closed()


def _fencing(backend: Backend) -> Fencing | None:
    owner = backend.capabilities.target is Fence.OWNER
    return backend if owner and isinstance(backend, Fencing) else None


def _landing(backend: Backend) -> Landing | None:
    return backend if _fencing(backend) and isinstance(backend, Landing) else None


_opened: weakref.WeakSet[Context] = weakref.WeakSet()
"""Every link of this process. A forked child notes the fork in each, so that no call has to ask the system."""


def _note_fork() -> None:
    # The child has only the thread that forked, so that nothing else uses the set.
    for each in _opened:
        each.forked = True


os.register_at_fork(after_in_child=_note_fork)
