"""The state that a batch of prefill takes from decode before its forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink import Status
from statelink.backend import logger
from statelink.errors import StatelinkError

if TYPE_CHECKING:
    from statelink import Link, Receiving

__all__ = ["Load", "Loads"]

log = logger("statelink.sglang")

MARGIN_SECONDS = 5.0
"""Seconds above the link's bound until the memory of a load that failed is taken back."""


class Load(NamedTuple):
    """What a request takes.

    Attributes:
        room: The room's id.
        addresses: Where the links of the decode server listen.
        tokens: N: where the state ends.
        prefix: P: what prefill has already.
        items: Where the state goes.
        content: SGLang's hash of the first N tokens.
    """

    room: int
    addresses: tuple[str, ...]
    tokens: int
    prefix: int
    items: dict[str, Any]
    content: bytes


class Loads:
    """Loads of one rank. Belongs to the scheduler's thread.

    Args:
        link: Receives.
        ready: An event that passes once nothing writes any more to memory that was just given to a request.
        deadline: Seconds that a load may take.
    """

    def __init__(self, link: Link, ready: Callable[[], Any], deadline: float) -> None:
        self._link, self._ready, self._deadline = link, ready, deadline
        self._queued: dict[str, Load] = {}
        self._batches: dict[int, list[tuple[str, Receiving | None]]] = {}
        self._count = 0
        self._waited = 0
        """The batch whose forward pass has waited last."""

    def put(self, rid: str, load: Load) -> None:
        """A request of the next batch takes state."""
        self._queued[rid] = load

    def cancel(self, rid: str) -> bool:
        """A request of the next batch takes none. Returns whether it would have."""
        return self._queued.pop(rid, None) is not None

    def start(self) -> int:
        """Begin the loads of the next batch. Returns the batch's number; -1 if it loads nothing. Does not block."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        self._count += 1
        self._batches[self._count] = [(rid, self._receive(rid, load)) for rid, load in queued.items()]
        return self._count

    def _receive(self, rid: str, load: Load) -> Receiving | None:
        try:
            return self._link.receive(
                load.room,
                list(load.addresses),
                load.tokens,
                load.items,
                prefix=load.prefix,
                ready=self._ready(),
                deadline=self._deadline,
                content=load.content,
            )
        except (StatelinkError, ValueError) as error:
            log.error("the request %s cannot take its history from decode: %s", rid, error)
            return None

    def wait(self, number: int) -> None:
        """A batch's forward pass begins. Blocks until the loads have ended, which each of them does at its deadline."""
        self._waited = number
        for _, room in self._batches.get(number, ()):
            if room is not None:
                room.wait()

    def finish(self, number: int) -> bool:
        """Whether a batch has computed with what it loads. Blocks until nothing writes to the memory any more."""
        good = self._waited == number
        if not good:
            log.error("a forward pass did not wait for what decode sends: SGLang runs it in another way than is known")
        self.wait(number)
        rooms = self._batches.pop(number, [])
        for rid, room in rooms:
            if room is None:
                good = False
            elif room.status is not Status.SUCCEEDED:
                good = False
                log.error("the request %s has not got its history from decode: %s", rid, room.reason)
                self._quiesce(room)
        return good

    def _quiesce(self, room: Receiving) -> None:
        bound = self._link.quiet_within or 0.0
        until = time.monotonic() + bound + MARGIN_SECONDS
        room.wait(max(0.0, until - time.monotonic()), quiesced=True)
        if not room.quiesced:
            room.take_back("SGLang gives the pages of a request that failed to others")

    def clear(self) -> None:
        """Drop what is queued, and end what is under way. Blocks until nothing writes to its memory any more."""
        self._queued.clear()
        for number in list(self._batches):
            for _, room in self._batches[number]:
                if room is not None:
                    room.abort("SGLang clears its prefix cache")
            self.finish(number)
