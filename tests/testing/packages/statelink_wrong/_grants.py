"""Backends whose fences do not hold."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from statelink.backend import BackendContext, Outcome, Region, Transfer
from statelink.errors import TransferError

from ._base import Ungranted, Wrong, everything

U64 = Any


class GrantsAll(Wrong):
    """Ignores what is granted, and looks only at the room."""

    regions: Sequence[Region] = ()

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.regions = regions

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        super().grant(peer, room, generation, addresses, nbytes)
        super().grant(peer, room, generation, *everything(self.regions))


class AnyRoom(GrantsAll):
    """Lets a peer write for rooms that it was never granted."""

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        first = self.regions[:1]
        if first:
            one = np.array([first[0].address], np.uint64), np.array([1], np.uint64)
            for room in (1, 12):
                super().grant(peer, room, 1, *one)


class KeepsGrants(Wrong):
    """Says that a grant is taken back, and lets the peer go on."""

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        return Transfer(Outcome(True))


class TellsEarly(Wrong):
    """Says that bytes have landed when the first ones have."""

    def when_landed(self, peer: str, room: int, generation: int, nbytes: int, then: Callable[[], object]) -> None:
        super().when_landed(peer, room, generation, 1, then)


class TellsLate(Wrong):
    """Goes on to wait for bytes of a grant that is revoked."""

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        self.revoked = peer, room, generation
        return super().revoke(peer, room, generation)

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        super().grant(peer, room, generation, addresses, nbytes)
        if hasattr(self, "awaited") and getattr(self, "revoked", None) == (peer, room, generation):
            super().when_landed(peer, room, generation, *self.awaited)

    def when_landed(self, peer: str, room: int, generation: int, nbytes: int, then: Callable[[], object]) -> None:
        self.awaited = nbytes, then
        super().when_landed(peer, room, generation, nbytes, then)


class ReplacesGrants(Wrong):
    """Forgets what a use of a room was granted before."""

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        super().revoke(peer, room, generation)
        super().grant(peer, room, generation, addresses, nbytes)


class RevokesLast(Wrong):
    """Takes back the last of several grants, and says that all are."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.granted: dict[tuple[str, int, int], list[tuple[U64, U64]]] = {}

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        super().grant(peer, room, generation, addresses, nbytes)
        self.granted.setdefault((peer, room, generation), []).append((addresses, nbytes))

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        done = super().revoke(peer, room, generation)
        for ranges in self.granted.pop((peer, room, generation), [])[:-1]:
            super().grant(peer, room, generation, *ranges)
        return done


class GrantsByRegion(Wrong):
    """Refuses a grant that is not inside one region."""

    regions: Sequence[Region] = ()

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.regions = regions

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        ends = [(region.address, region.address + region.nbytes) for region in self.regions]
        for start, length in zip(addresses.tolist(), nbytes.tolist(), strict=True):
            if not any(first <= start and start + length <= last for first, last in ends):
                raise TransferError("a range is in no region")
        super().grant(peer, room, generation, addresses, nbytes)


class Late(Ungranted):
    """Puts bytes in place three seconds after the process that moved them has ended, though its fence is the mover's.

    Attributes:
        only_stopped: Whether it does so only in a process that stood still before.
    """

    name = "wrong-late"
    only_stopped = False

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.closed = threading.Event()

    def descriptor(self) -> bytes:
        return os.getpid().to_bytes(8, "little") + super().descriptor()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor[8:], regions)
        pid = int.from_bytes(descriptor[:8], "little")
        threading.Thread(target=self.come_late, args=[pid], daemon=True).start()

    def come_late(self, pid: int) -> None:
        stood_still, last = False, time.monotonic()
        while os.path.exists(f"/proc/{pid}"):
            if self.closed.wait(0.02):
                return
            stood_still, last = stood_still or time.monotonic() - last > 0.25, time.monotonic()
        if (stood_still or not self.only_stopped) and not self.closed.wait(3.0):
            ctypes.memset(self.regions[0].address, 1, 4096)

    def close(self) -> None:
        self.closed.set()
        super().close()


class LateWhenStopped(Late):
    """The same, but only if its own process stood still in the middle of the write."""

    name = "wrong-late-when-stopped"
    only_stopped = True
