"""The decode side of a staged component."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from statelink.backend import ReceiveContext, ReceiveHook
from statelink.errors import RoomError, WireError

from ._messages import Ask, Granted, RingAddress, Written, read, write

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from statelink.plan import Move

    from ._ring import Ring

__all__ = ["StagedReceive"]

MOST_PARCELS = 16
"""Most parcels of one component of one room that one writer may have asked for and not written."""


class StagedReceive(ReceiveHook):
    """One component of one room, from one writer.

    Args:
        rings: Component to this side's ring for it. Components whose memory cannot be staged are absent.
        wanted: Whether a component's moves are to be staged.
    """

    def __init__(self, rings: Mapping[str, Ring], wanted: Callable[[str, Move], bool]) -> None:
        self._rings = rings
        self._ring: Ring | None = None
        self._wanted = wanted
        self._move: Move | None = None
        self._lock = threading.Lock()
        self._asked: dict[int, int] = {}
        self._granted: dict[int, int] = {}
        self._next = 0
        self._nbytes = 0
        self._came: npt.NDArray[np.bool_] | None = None
        self._failed = False
        self._over = False

    def prepare(self, context: ReceiveContext) -> bytes:
        """Decide whether to stage. Tell prefill the address of the ring, or nothing if the blocks move directly."""
        move = context.expected()
        ring = self._rings.get(context.component)
        if ring is None or not move.nbytes or not self._wanted(context.component, move):
            return b""
        self.in_place, self._move, self._ring = False, move, ring
        return write(RingAddress(ring.region, ring.memory.address, ring.memory.nbytes))

    def message(self, context: ReceiveContext, payload: bytes) -> None:
        """Prefill asks for space, or has written a parcel."""
        said = read(payload)
        if self._ring is None or self._move is None or isinstance(said, Granted):
            raise WireError(f"prefill says {type(said).__name__.lower()!r} of a component that is not staged")
        if isinstance(said, Ask):
            self._ask(context, said, self._ring)
        else:
            self._written(said, self._move, self._ring)

    def _ask(self, context: ReceiveContext, said: Ask, ring: Ring) -> None:
        with self._lock:
            if self._failed:
                return
            if said.number != self._next or len(self._asked) >= MOST_PARCELS:
                raise WireError("prefill asks for too much space at once, or twice", cause=str(said))
            self._next += 1
            self._asked[said.number] = said.nbytes

        def grant(at: int) -> None:
            with self._lock:
                over = self._over
                if not over:
                    self._granted[said.number] = at
            if over:
                ring.give(at)
                return
            answer = write(Granted(said.number, at))
            context.grant(ring.memory.address + at, said.nbytes, lambda: context.message(answer))

        ring.ask(self, said.nbytes, grant, peer=context.peer)

    def _written(self, said: Written, move: Move, ring: Ring) -> None:
        with self._lock:
            if self._failed:
                return
            at, nbytes = self._granted.get(said.number), self._asked.get(said.number)
        if at is None or nbytes is None:
            raise WireError("prefill wrote where no space was granted", cause=f"parcel {said.number}")
        part, tiles = move.only(said.layers), said.parts()
        total = sum(part.tile_nbytes(tile) for tile in tiles)
        if total != nbytes:  # checked before memory of that size is used
            raise WireError("a parcel is not what was asked for", cause=f"{nbytes} bytes asked for, {total} written")
        if self._came is None:
            self._came = move.marks()
        for tile in tiles:
            part.mark(tile, self._came)
        ring.memory.unpack([part.places(tile, "target") for tile in tiles], at)
        with self._lock:
            del self._asked[said.number], self._granted[said.number]
            self._nbytes += nbytes
        ring.give(at)

    def waits(self) -> str:
        """It waits for space for which prefill has asked, or for parcels that have space and are not written."""
        with self._lock:
            granted = sum(self._asked[number] for number in self._granted)
        theirs = f"{granted} bytes that prefill has space for in this side's staging ring" if granted else ""
        return " and ".join(filter(None, (self._ring.waits(self) if self._ring is not None else "", theirs)))

    def finish(self, context: ReceiveContext) -> None:
        """Check that everything has come.

        Raises:
            RoomError: Something is missing.
        """
        # Asked again: when the space was offered, decode may have known only the number of pages.
        if self._move is not None and self._nbytes != (promised := context.expected().nbytes):
            raise RoomError(
                "a writer did not stage what the plan promised",
                cause=f"{promised} bytes promised, {self._nbytes} written",
                component=context.component,
                code="room.bytes",
            )

    def abort(self, context: ReceiveContext) -> None:
        """Ask for no more space. Prefill may still write to the space that was granted."""
        with self._lock:
            self._failed = True
        if self._ring is not None:
            self._ring.drop(self)

    def released(self, context: ReceiveContext) -> None:
        """Nothing of this writer can land in the ring. Give its space back."""
        with self._lock:
            self._failed = self._over = True
            granted, self._granted = list(self._granted.values()), {}
        if self._ring is not None:
            self._ring.drop(self)
            for at in granted:
                self._ring.give(at)
