"""A transfer library in memory, and the backend over it: bytes land block by block, whenever the world says so.

It is as bad as the real ones: a transfer goes on after everybody forgot about it, also while its process is stopped,
and a killed process's bytes may land for a moment. With an owner's fence, the receiver checks every block's grant.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from statelink.backend import (
    ANY,
    DIRECT,
    Backend,
    BackendContext,
    Batch,
    Blocks,
    Capabilities,
    Fence,
    Probe,
    Strategy,
    SubmitMode,
    Transfer,
)
from statelink.errors import TransferError

from .rings import lease_at
from .threads import give_way

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from statelink.state import Region

    from .process import Process
    from .world import World

__all__ = ["AFTERLIFE", "STUCK", "Flight", "MoverBackend", "OwnerBackend", "PromptBackend"]

AFTERLIFE = 0.005
"""Seconds for which a killed process's bytes may still land."""
STUCK = 6.0
"""Seconds for which a submission may be stuck in the library: longer than it takes to give a silent peer up."""


class Flight(Transfer):
    """One batch on its way.

    Attributes:
        until: World time after which it is dropped: its process was killed.
        leases: Space in rings that each block goes from and to, as it was lent when the flight began.
        uses: Room and generation that each block is for. Where the batch does not say: to whom its target belonged when
            the flight began.
    """

    __slots__ = ("batch", "blocks", "leases", "mover", "next", "target", "until", "uses")

    def __init__(self, mover: Process, target: Process, batch: Batch) -> None:
        super().__init__()
        self.mover = mover
        self.target = target
        self.batch = batch
        self.blocks: Blocks = batch.blocks
        self.next = 0
        self.until: float | None = None
        self.leases = [
            (lease_at(mover, source, nbytes), lease_at(target, there, nbytes))
            for source, there, nbytes in zip(
                batch.blocks.source.tolist(), batch.blocks.target.tolist(), batch.blocks.nbytes.tolist(), strict=True
            )
        ]
        self.uses = [(batch.room, batch.generation)] * batch.blocks.count
        if not batch.room and target.alive:
            targets = zip(batch.blocks.target.tolist(), batch.blocks.nbytes.tolist(), self.leases, strict=True)
            self.uses = [target.use_at(there, nbytes, lease) for there, nbytes, (_, lease) in targets]


class _Options(msgspec.Struct):
    """None."""


class SimBackend(Backend):
    """What both kinds have in common."""

    api_version = 1
    Options: ClassVar[type] = _Options
    strategies: ClassVar[dict[str, Strategy]] = {"*": DIRECT}

    def __init__(self, context: BackendContext) -> None:
        self.world: World = context.options[0]
        self.process: Process = context.options[1]
        self.peers: dict[str, Process] = {}
        self.calls: dict[str, str] = {}

    @classmethod
    def probe(cls, options: Any) -> Probe:
        return Probe(ok=True, reason="nothing is needed")

    def register(self, regions: Sequence[Region]) -> None:
        pass

    def descriptor(self) -> bytes:
        return self.process.name.encode()

    @contextmanager
    def _alone(self, peer: str, what: str) -> Iterator[None]:
        """A call about a peer, beside which there must be no other."""
        other = self.calls.get(peer)
        # What a killed process still does, until its code has noticed, is nothing to the others.
        if (
            other is not None and self.process.alive
        ):  # not raised here, where the core would take it for a failure of this library
            self.world.defects.append(f"{self.process.name}: {what} of {peer} while {other} of it is under way")
        self.calls[peer] = what
        yield
        self.calls.pop(peer, None)

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        with self._alone(peer, "connect"):
            for _ in range(self.world.rng.randrange(3)):
                give_way()
            found = self.world.everybody.get(descriptor.decode())
        if found is None or self.world.rng.random() < self.world.faults.connect:
            raise TransferError("cannot be reached", cause="the library says so", peer=peer)
        self.peers[peer] = found

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if peer not in self.peers:
            raise TransferError("unknown peer", peer=peer)
        faults = self.world.faults
        with self._alone(peer, "submit"):
            prompt = self.capabilities.submit_mode is SubmitMode.ASYNC
            if not prompt and self.world.rng.random() < faults.stuck:
                self.world.counts["stuck"] += 1
                if self.world.rng.random() < 0.5:  # that is what a library waits for
                    self.peers[peer].paused = self.peers[peer].alive
                give_way(self.world.time + STUCK * self.world.rng.random())
        if self.world.rng.random() < faults.submit:
            raise TransferError("the queue is full", peer=peer)
        if peer not in self.peers:
            self.world.defects.append(f"{self.process.name}: {peer} was disconnected during a submit")
        flight = Flight(self.process, self.peers[peer], batch)
        self.world.flights.append(flight)
        self.world.counts["joint"] += not batch.room
        return flight

    def poll(self, transfers: Sequence[Transfer]) -> None:
        pass

    def disconnect(self, peer: str) -> None:
        with self._alone(peer, "disconnect"):
            give_way()
            self.peers.pop(peer, None)

    def close(self) -> None:
        pass

    # What the world asks.

    @property
    def open(self) -> list[tuple[str, int, int]]:
        """Uses of rooms for which somebody may write here."""
        return []

    def land(self, flight: Flight) -> None:
        """One more block of a flight reaches this side's memory."""
        number = flight.next
        source, target, nbytes = (
            int(column[number]) for column in (flight.blocks.source, flight.blocks.target, flight.blocks.nbytes)
        )
        refusal = self.refusal(flight, target, nbytes)
        if refusal:
            self.world.finish(flight, refusal)
            return
        self.world.landing(flight, source, target, nbytes)
        ctypes.memmove(target, source, nbytes)
        flight.next += 1
        if flight.next == flight.blocks.count:
            self.landed(flight)

    def landed(self, flight: Flight) -> None:
        """All blocks of a flight are here."""
        self.world.finish(flight)

    def refusal(self, flight: Flight, target: int, nbytes: int) -> str:
        return ""


def _capabilities(fence: Fence, *, prompt: bool = False, joins: bool = False) -> Capabilities:
    return Capabilities(
        memory_kinds=frozenset({"dram"}),
        state_types=ANY,
        submit_mode=SubmitMode.ASYNC if prompt else SubmitMode.BLOCKING,
        stalled_peers=2,
        ends_unpolled=prompt,
        prompt_fences=prompt,
        source=Fence.MOVER,
        target=fence,
        thread_safe=True,
        joins_rooms=joins,
        max_blocks=8 if joins else 3,
        max_transfers=2,
    )


class MoverBackend(SimBackend):
    """Nobody but the mover can stop it, as with remote memory access."""

    name = "sim-mover"
    capabilities = _capabilities(Fence.MOVER, joins=True)


class OwnerBackend(SimBackend):
    """The receiver checks every block."""

    name = "sim-owner"
    capabilities = _capabilities(Fence.OWNER)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.grants: dict[tuple[str, int, int], list[tuple[int, int]]] = {}

    def grant(
        self,
        peer: str,
        room: int,
        generation: int,
        addresses: npt.NDArray[np.uint64],
        nbytes: npt.NDArray[np.uint64],
    ) -> None:
        low, size = addresses.tolist(), nbytes.tolist()
        ranges = self.grants.setdefault((peer, room, generation), [])
        ranges += [(a, a + n) for a, n in zip(low, size, strict=True)]

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        self.grants.pop((peer, room, generation), None)
        done = Transfer()
        done.succeed()
        return done

    @property
    def open(self) -> list[tuple[str, int, int]]:
        return list(self.grants)

    def refusal(self, flight: Flight, target: int, nbytes: int) -> str:
        ranges = self.grants.get((flight.mover.name, flight.batch.room, flight.batch.generation), [])
        inside = any(low <= target and target + nbytes <= high for low, high in ranges)
        return "" if inside else "not granted"


class PromptBackend(OwnerBackend):
    """The same, where no call blocks and nothing has to be polled, so that the control thread may call it.

    The receiver sees when all bytes of a use have landed. The mover learns of each flight's end later than that.
    """

    name = "sim-prompt"
    capabilities = _capabilities(Fence.OWNER, prompt=True)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.nbytes: Counter[tuple[str, int, int]] = Counter()
        self.awaited: dict[tuple[str, int, int], tuple[int, Callable[[], object]]] = {}

    def when_landed(self, peer: str, room: int, generation: int, nbytes: int, then: Callable[[], object]) -> None:
        use = peer, room, generation
        if use in self.awaited or use not in self.grants:
            self.world.defects.append(f"{self.process.name} waits twice, or without a grant, for the bytes of {use}")
        self.awaited[use] = nbytes, then
        self._tell(use)

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        self.awaited.pop((peer, room, generation), None)
        self.nbytes.pop((peer, room, generation), None)
        return super().revoke(peer, room, generation)

    def land(self, flight: Flight) -> None:
        if flight.next == flight.blocks.count:
            self.world.finish(flight)
        else:
            super().land(flight)

    def landed(self, flight: Flight) -> None:
        use = flight.mover.name, flight.batch.room, flight.batch.generation
        self.nbytes[use] += flight.blocks.total
        self._tell(use)

    def _tell(self, use: tuple[str, int, int]) -> None:
        due, then = self.awaited.get(use, (0, None))
        if then is not None and self.nbytes[use] >= due:
            del self.awaited[use]
            self.world.counts["told"] += 1
            then()
