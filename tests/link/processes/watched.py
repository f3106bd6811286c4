"""Real backends that are watched: what they move for each room, and what they hold for rooms.

``watched-tcp`` and the like are found as any installed package's backends are, and do what the real ones do. In a
process that is told to, they lie: see `lie`. All of this is about the link that the process opened last.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from statelink.backend import Backend, Batch, Outcome, SubmitMode, Transfer
from statelink.registry import load_backend

if TYPE_CHECKING:
    from statelink.backend import BackendContext


class Progress:
    """What prefill's backend has moved for one use of a room, in ``flying`` batches and those that have ended."""

    begun = flying = nbytes = 0
    failed = broken = False
    """Whether the room has failed, and whether its batches are to fail in the library (of Mooncake)."""

    def began(self) -> None:
        """A batch is about to be given to the library. On a data thread."""

    def arrived(self) -> None:
        """A batch has arrived, and the core does not know of it yet. On a data thread."""


rooms: defaultdict[int, Progress] = defaultdict(Progress)
_held: set[Any] = set()  # batches, and the grants by peer, room and generation
_revokes: list[Transfer] = []
_lies, _lock, _breaking = False, threading.Lock(), threading.local()


def lie(lies: bool) -> None:
    """Whether backends of this process say at once that nothing can land any more, when the core takes memory back.

    A revoke is then done before it has begun, and what is in flight for a room that failed counts as settled. A backend
    whose `submit` blocks moves its batches on a thread of its own, so that something is in flight then.
    """
    global _lies
    _lies = lies


def held() -> int:
    """Batches, grants and revokes that are not over."""
    with _lock:
        return len(_held) + sum(each.outcome is None for each in _revokes)


class Flight(Transfer):
    """One batch in the library. It ends when the core polls, and not before."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.progress, self.nbytes = rooms[batch.room], batch.blocks.total
        self.real: Transfer | None = None


class Watched(Backend):
    """The part that is laid over a real backend."""

    def __init__(self, context: BackendContext) -> None:
        for each in (rooms, _held, _revokes):
            each.clear()
        self._late = ThreadPoolExecutor(1)
        super().__init__(context)  # type: ignore[safe-super]

    def submit(self, peer: str, batch: Batch) -> Transfer:
        flight = Flight(batch)
        with _lock:
            _held.add(flight)
            flight.progress.begun += 1
            flight.progress.flying += 1
        flight.progress.began()
        if _lies and self.capabilities.submit_mode is SubmitMode.BLOCKING:
            self._late.submit(self._submit, flight, peer, batch)  # else a room never fails while the library moves it
            return flight
        try:
            self._submit(flight, peer, batch)
        except BaseException:
            self._land(flight)
            _held.discard(flight)
            raise
        return flight

    def _submit(self, flight: Flight, peer: str, batch: Batch) -> None:
        _breaking.now = flight.progress.broken
        flight.real = super().submit(peer, batch)  # type: ignore[safe-super]

    def poll(self, transfers: Sequence[Transfer]) -> None:
        under = [each.real if isinstance(each, Flight) else each for each in transfers]
        unsure = [each for each in under if each and (each.outcome is None or each.outcome.unsettled)]
        super().poll(unsure)  # type: ignore[safe-super]
        for flight, real in zip(transfers, under, strict=True):
            if isinstance(flight, Flight):
                self._look(flight, real)

    def _look(self, flight: Flight, real: Transfer | None) -> None:
        flew = flight.outcome is None
        if real and real.outcome is not None:
            flight.outcome = real.outcome
        elif flew and _lies and flight.progress.failed:
            flight.fail("its room failed", settled=True)
        if flew and flight.outcome is not None:
            self._land(flight)
        if real and real.outcome is not None and not real.outcome.unsettled:
            _held.discard(flight)

    def _land(self, flight: Flight) -> None:
        """A batch has ended, or was refused."""
        good = flight.outcome is not None and flight.outcome.ok
        with _lock:
            flight.progress.flying -= 1
            flight.progress.nbytes += flight.nbytes * good
        if good:
            flight.progress.arrived()

    def close(self) -> None:
        self._late.shutdown()
        super().close()  # type: ignore[safe-super]

    def disconnect(self, peer: str) -> None:
        super().disconnect(peer)  # type: ignore[safe-super]
        _held.difference_update([each for each in list(_held) if isinstance(each, tuple) and each[0] == peer])


class WatchedFence(Watched):
    """The same over a backend whose memory's owner can stop what comes."""

    def grant(self, peer: str, room: int, generation: int, *memory: Any) -> None:
        super().grant(peer, room, generation, *memory)  # type: ignore[misc]
        _held.add((peer, room, generation))

    def revoke(self, *use: Any) -> Transfer:
        done = Transfer(Outcome(True)) if _lies else super().revoke(*use)  # type: ignore[misc]
        with _lock:
            _held.discard(use)
            _revokes[:] = [each for each in (*_revokes, done) if each.outcome is None]
        return done


def _let_mooncake_break() -> None:
    """Let the library give up some batches at once, as it does after its timeout; their bytes may still land."""
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine
    given_up: set[int] = set()

    def submitting(real: Callable[..., int]) -> Callable[..., int]:
        def submit(self: Any, *transfer: Any) -> int:
            number = real(self, *transfer)
            if getattr(_breaking, "now", False):
                given_up.add(number)
            return number

        return submit

    def asking(real: Callable[..., int]) -> Callable[..., int]:
        def ask(self: Any, numbers: Any) -> int:
            asked = {numbers} if isinstance(numbers, int) else set(numbers)
            return -1 if asked & given_up else real(self, numbers)

        return ask

    for submit in ("batch_transfer_async_write", "transfer_submit_write"):
        setattr(engine, submit, submitting(getattr(engine, submit)))
    for ask in ("transfer_check_status", "get_batch_transfer_status"):
        setattr(engine, ask, asking(getattr(engine, ask)))


def __getattr__(name: str) -> type[Backend]:
    """Backends whose library is imported when they are picked."""
    if name not in ("Tcp", "Nixl", "Mooncake", "Mori", "Ascend"):
        raise AttributeError(name)
    real = load_backend(name.lower())
    if name == "Mooncake":
        _let_mooncake_break()
    laid = WatchedFence if hasattr(real, "revoke") else Watched
    declared = dataclasses.replace(real.capabilities, ends_unpolled=False)  # a flight ends when it is polled
    made = globals()[name] = type(name, (laid, real), {"name": f"watched-{name.lower()}", "capabilities": declared})
    return made
