"""Real backends that are watched: what they move for each room, and what they hold for rooms.

``watched-tcp`` and the like are found as any installed package's backends are. They use what every backend offers, and
do what the real one does. In a process that is told to, they lie: see `lie`.
"""

from __future__ import annotations

import importlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statelink.backend import Backend, Batch, SubmitMode, Transfer
from statelink.registry import load_backend

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from statelink.backend import BackendContext

__all__ = ["Progress", "Watch", "lie", "watch"]

_lies = False
_breaking = threading.local()


def lie(lies: bool) -> None:
    """Whether backends of this process say at once that nothing can land any more, when the core takes memory back.

    A revoke is then done before it has begun, and what is in flight for a room that failed counts as settled. A backend
    whose `submit` blocks moves its batches on a thread of its own, so that something is in flight then.
    """
    global _lies
    _lies = lies


@dataclass
class Progress:
    """What prefill's backend has moved for one use of a room.

    Attributes:
        begun: Batches that were given to the library.
        flying: Those of them that have not ended.
        nbytes: Bytes that have arrived.
        failed: Whether the room has failed; for backends that lie.
    """

    begun: int = 0
    flying: int = 0
    nbytes: int = 0
    failed: bool = False


class Flight(Transfer):
    """One batch in the library. It ends when the core polls, and not before."""

    __slots__ = ("nbytes", "progress", "real", "room")

    def __init__(self, batch: Batch, progress: Progress) -> None:
        super().__init__()
        self.room, self.nbytes, self.progress = batch.room, batch.blocks.total, progress
        self.real: Transfer | None = None


@dataclass
class Watch:
    """What a link's backend does. Safe to use from any thread.

    Attributes:
        rooms: What it has moved, by room.
        began: Called on a data thread when a batch is about to be given to the library.
        arrived: Called on a data thread when a batch has arrived, before the core knows of it.
        broken: Rooms of which every batch is to fail in the library, where that can be had (Mooncake).
    """

    rooms: defaultdict[int, Progress] = field(default_factory=lambda: defaultdict(Progress))
    began: Callable[[int, Progress], None] = lambda room, progress: None
    arrived: Callable[[int, Progress], None] = lambda room, progress: None
    broken: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    flights: set[Flight] = field(default_factory=set)
    grants: set[tuple[str, int, int]] = field(default_factory=set)
    revokes: list[Transfer] = field(default_factory=list)

    def held(self) -> int:
        """Batches and grants that are not over."""
        with self.lock:
            return len(self.flights) + len(self.grants) + sum(each.outcome is None for each in self.revokes)

    def start(self, batch: Batch) -> Flight:
        """A batch is about to be given to the library."""
        with self.lock:
            flight = Flight(batch, self.rooms[batch.room])
            self.flights.add(flight)
            flight.progress.begun += 1
            flight.progress.flying += 1
        self.began(batch.room, flight.progress)
        return flight

    def land(self, flight: Flight) -> None:
        """A batch has ended, or was refused."""
        good = flight.outcome is not None and flight.outcome.ok
        with self.lock:
            flight.progress.flying -= 1
            flight.progress.nbytes += flight.nbytes if good else 0
        if good:
            self.arrived(flight.room, flight.progress)

    def forget(self, flight: Flight) -> None:
        """Nothing of a batch is read or lands any more."""
        with self.lock:
            self.flights.discard(flight)


_watch = Watch()


def watch() -> Watch:
    """That of the link that this process opened last."""
    return _watch


class Watched(Backend):
    """The part that is laid over a real backend."""

    def __init__(self, context: BackendContext) -> None:
        global _watch
        _watch = self.watch = Watch()
        self._late = ThreadPoolExecutor(1)
        super().__init__(context)  # type: ignore[safe-super]

    def submit(self, peer: str, batch: Batch) -> Transfer:
        flight = self.watch.start(batch)  # it may be over when the real one returns
        if _lies and self.capabilities.submit_mode is SubmitMode.BLOCKING:
            self._late.submit(self._submit, flight, peer, batch)  # else a room never fails while the library moves it
            return flight
        try:
            self._submit(flight, peer, batch)
        except BaseException:
            self.watch.land(flight)
            self.watch.forget(flight)
            raise
        return flight

    def _submit(self, flight: Flight, peer: str, batch: Batch) -> None:
        _breaking.now = batch.room in self.watch.broken
        flight.real = super().submit(peer, batch)  # type: ignore[safe-super]

    def poll(self, transfers: Sequence[Transfer]) -> None:
        real = [each.real if isinstance(each, Flight) and each.real is not None else each for each in transfers]
        known = [each for each in real if not isinstance(each, Flight)]
        super().poll([each for each in known if each.outcome is None or each.outcome.unsettled])  # type: ignore[safe-super]
        for each, under in zip(transfers, real, strict=True):
            if isinstance(each, Flight):
                self._look(each, under)

    def _look(self, flight: Flight, real: Transfer) -> None:
        flew = flight.outcome is None
        if real.outcome is not None:
            flight.outcome = real.outcome
        elif flew and _lies and flight.progress.failed:
            flight.fail("its room failed", settled=True)
        if flew and flight.outcome is not None:
            self.watch.land(flight)
        if real.outcome is not None and not real.outcome.unsettled:
            self.watch.forget(flight)

    def close(self) -> None:
        self._late.shutdown()
        super().close()  # type: ignore[safe-super]

    def disconnect(self, peer: str) -> None:
        super().disconnect(peer)  # type: ignore[safe-super]
        with self.watch.lock:
            self.watch.grants = {key for key in self.watch.grants if key[0] != peer}


class WatchedFence(Watched):
    """The same over a backend whose memory's owner can stop what comes."""

    def grant(
        self, peer: str, room: int, generation: int, addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]
    ) -> None:
        real: Any = super()
        real.grant(peer, room, generation, addresses, nbytes)
        with self.watch.lock:
            self.watch.grants.add((peer, room, generation))

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        real: Any = super()
        done: Transfer = Transfer() if _lies else real.revoke(peer, room, generation)
        if _lies:
            done.succeed()
        with self.watch.lock:
            self.watch.grants.discard((peer, room, generation))
            self.watch.revokes = [each for each in (*self.watch.revokes, done) if each.outcome is None]
        return done


def _let_mooncake_break() -> None:
    """One more entry, which goes nowhere, makes a batch fail in the library; the rest of it may still land."""
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine
    real = engine.batch_transfer_sync_write

    def write(self: Any, session: str, near: list[int], far: list[int], sizes: list[int]) -> int:
        if getattr(_breaking, "now", False):
            near, far, sizes = [near[0], *near], [8, *far], [8, *sizes]
        return int(real(self, session, near, far, sizes))

    engine.batch_transfer_sync_write = write


def __getattr__(name: str) -> type[Backend]:
    """Backends whose library is imported when they are picked."""
    if name not in ("Tcp", "Nixl", "Mooncake", "Mori", "Ascend"):
        raise AttributeError(name)
    real = load_backend(name.lower())
    if name == "Mooncake":
        _let_mooncake_break()
    laid = WatchedFence if hasattr(real, "revoke") else Watched
    made = type(name, (laid, real), {"name": f"watched-{name.lower()}"})
    globals()[name] = made
    return made
