"""Backends that are wrong, each in one way, and otherwise the embedded one."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import threading
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from statelink.backend import (
    Backend,
    BackendContext,
    Batch,
    Check,
    Fence,
    Op,
    Outcome,
    Probe,
    Region,
    Side,
    SubmitMode,
    Transfer,
)
from statelink.errors import TransferError
from statelink.tcp import TcpBackend

U64 = Any


class Wrong(TcpBackend):
    """The embedded backend. The name of one that derives from it is that of its class: ``wrong-too-far``."""

    def __init_subclass__(cls) -> None:
        cls.name = "wrong" + re.sub("[A-Z]", lambda found: f"-{found[0].lower()}", cls.__name__)


class Copied(Transfer):
    """A transfer whose outcome is that of another one, told otherwise."""

    def __init__(self, real: Transfer) -> None:
        super().__init__()
        self.real = real


class Telling(Wrong):
    """Tells of each transfer what `tell` makes of the truth."""

    capabilities = dataclasses.replace(TcpBackend.capabilities, ends_unpolled=False)

    def tell(self, outcome: Outcome) -> Outcome | None:
        return outcome

    def submit(self, peer: str, batch: Batch) -> Transfer:
        return Copied(super().submit(peer, batch))

    def poll(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if isinstance(transfer, Copied) and transfer.real.outcome is not None and transfer.outcome is None:
                transfer.outcome = self.tell(transfer.real.outcome)


def everything(regions: Sequence[Region]) -> U64:
    """All regions as ranges that can be granted: addresses, and lengths."""
    return np.array(sorted((region.address, region.nbytes) for region in regions), np.uint64).reshape(-1, 2).T.copy()


class Early(Wrong):
    def submit(self, peer: str, batch: Batch) -> Transfer:
        super().submit(peer, batch)
        return Transfer(Outcome(True))


class DropsLast(Wrong):
    def submit(self, peer: str, batch: Batch) -> Transfer:
        if batch.blocks.count > 1:
            batch = batch._replace(blocks=batch.blocks[:-1])
        return super().submit(peer, batch)


class GrantsAll(Wrong):
    """Ignores what is granted, and looks only at the room."""

    regions: Sequence[Region] = ()

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.regions = regions

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        super().grant(peer, room, generation, addresses, nbytes)
        super().grant(peer, room, generation, *everything(self.regions))


class TooFar(GrantsAll):
    """Writes one byte too far."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        longer = batch.blocks.nbytes.copy()
        longer[-1] += np.uint64(longer[-1] > 50)
        try:
            return super().submit(peer, batch._replace(blocks=dataclasses.replace(batch.blocks, nbytes=longer)))
        except TransferError:
            return super().submit(peer, batch)


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


class Swallows(Telling):
    """Reports what failed as done."""

    def tell(self, outcome: Outcome) -> Outcome:
        return Outcome(True)


class Silent(Telling):
    """Fails without a word."""

    def tell(self, outcome: Outcome) -> Outcome:
        return outcome if outcome.ok else outcome._replace(reason="")


class Hangs(Telling):
    """Never tells of a failure."""

    def tell(self, outcome: Outcome) -> Outcome | None:
        return outcome if outcome.ok else None


class Unsettled(Telling):
    """Goes on for a while with a peer's last batch after a disconnect, and calls that batch settled.

    Attributes:
        goes_on: For how many seconds.
    """

    goes_on = 1.0

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.made: dict[str, list[tuple[Transfer, Batch]]] = {}
        self.leaving: dict[str, threading.Thread] = {}

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if peer in self.leaving:
            raise TransferError("the peer is not connected")
        made = super().submit(peer, batch)
        self.made.setdefault(peer, []).append((made, batch))
        return made

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        leaving = self.leaving.pop(peer, None)
        if leaving is not None:
            leaving.join()
        super().connect(peer, descriptor, regions)

    def disconnect(self, peer: str) -> None:
        made = self.made.pop(peer, [])
        if not made:
            super().disconnect(peer)
            return
        self.leaving[peer] = threading.Thread(target=self.go_on, args=[peer, made[-1][1]], daemon=True)
        for transfer, _ in made:
            if transfer.outcome is None:
                transfer.fail("the peer was disconnected", settled=True)
        self.leaving[peer].start()

    def go_on(self, peer: str, batch: Batch) -> None:
        until = time.monotonic() + self.goes_on
        while time.monotonic() < until:
            transfer = TcpBackend.submit(self, peer, batch)
            while transfer.outcome is None and time.monotonic() < until:
                time.sleep(0.001)
        super().disconnect(peer)


class LeaksThreads(Wrong):
    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeaksFiles(Wrong):
    def close(self) -> None:
        super().close()
        os.dup(0)


class LeaksMemory(Wrong):
    kept: list[bytearray] = []  # noqa: RUF012 - shared on purpose

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        self.kept.append(bytearray(b"x") * (1 << 20))


class TakesGarbage(Wrong):
    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        try:
            super().connect(peer, descriptor, regions)
        except TransferError:
            if peer != "nobody":
                raise


class Crashes(Wrong):
    """Raises what is no error of Statelink's."""

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        assert descriptor[:5] == b"SLTCP"
        super().connect(peer, descriptor, regions)


class Unchecked(Wrong):
    """Takes whatever it is told to move to a peer that it knows."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        try:
            return super().submit(peer, batch)
        except TransferError as error:
            if "not connected" in str(error):
                raise
            return Transfer(Outcome(True))


class ClosesOnce(Wrong):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed already")
        self.is_closed = True
        super().close()


class TakesReads(Wrong):
    def submit(self, peer: str, batch: Batch) -> Transfer:
        return Transfer(Outcome(True)) if batch.op is Op.READ else super().submit(peer, batch)


class TakesAnyKind(Wrong):
    def register(self, regions: Sequence[Region]) -> None:
        super().register([Region(region.address, region.nbytes) for region in regions])


class HidesFence(Wrong):
    """Declares a fence that is not the one it has."""

    capabilities = dataclasses.replace(
        TcpBackend.capabilities,
        fences=MappingProxyType({(Op.WRITE, Side.SOURCE): Fence.MOVER, (Op.WRITE, Side.TARGET): Fence.MOVER}),
    )


class ForgetsPeers(Wrong):
    """Cannot connect a peer again."""

    def disconnect(self, peer: str) -> None:
        super().disconnect(peer)
        self.seen = {*getattr(self, "seen", ()), peer}

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        if peer in getattr(self, "seen", ()):
            raise TransferError("this peer was here before")
        super().connect(peer, descriptor, regions)


class ForgetsLine(Wrong):
    """Lacks one line of its constructor."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context


class LeaksShared(Wrong):
    """Leaves a file of shared memory behind each time it was open."""

    def close(self) -> None:
        super().close()
        left = f"/dev/shm/{os.environ['STATELINK_TEST_LEFT']}-{os.getpid()}-{time.monotonic_ns()}"
        os.close(os.open(left, os.O_CREAT | os.O_RDWR, 0o600))


class Waiting(Unsettled):
    """Blocks in `submit` until a batch has moved, its peer was disconnected, or time is up.

    Attributes:
        unanswered: Seconds after which a peer counts as lost.
    """

    capabilities = dataclasses.replace(TcpBackend.capabilities, submit_mode=SubmitMode.BLOCKING)
    unanswered = 60.0

    def submit(self, peer: str, batch: Batch) -> Transfer:
        made = super().submit(peer, batch)
        until = time.monotonic() + self.unanswered
        while made.outcome is None:
            self.poll([made])
            if time.monotonic() > until:
                made.fail("the peer does not answer", settled=True)
            time.sleep(0.0005)
        return made


class SettledByDisconnect(Waiting):
    """A blocking one whose bytes go on after a disconnect, though it calls them settled."""


class SettledByTimeout(Waiting):
    """A blocking one that calls settled what its peer has not answered."""

    unanswered = 0.3


class Ungranted(Backend):
    """The embedded backend without an owner's fence: one grant of everything serves every batch."""

    api_version = 1
    name = "wrong-ungranted"
    Options = TcpBackend.Options
    capabilities = dataclasses.replace(
        TcpBackend.capabilities, fences=MappingProxyType({(Op.WRITE, side): Fence.MOVER for side in Side})
    )
    strategies = TcpBackend.strategies

    def __init__(self, context: BackendContext) -> None:
        self.inner = TcpBackend(context)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        return TcpBackend.probe(options)

    def register(self, regions: Sequence[Region]) -> None:
        self.inner.register(regions)
        self.regions = regions

    def descriptor(self) -> bytes:
        return self.inner.descriptor()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        self.inner.connect(peer, descriptor, regions)
        if self.regions:
            self.inner.grant(peer, 1, 1, *everything(self.regions))

    def submit(self, peer: str, batch: Batch) -> Transfer:
        return self.inner.submit(peer, batch._replace(room=1, generation=1))

    def poll(self, transfers: Sequence[Transfer]) -> None:
        self.inner.poll(transfers)

    def disconnect(self, peer: str) -> None:
        self.inner.disconnect(peer)

    def close(self) -> None:
        self.inner.close()


class OneRoom(Ungranted):
    """Says that a batch may carry several rooms, and refuses one that names none."""

    name = "wrong-one-room"
    capabilities = dataclasses.replace(Ungranted.capabilities, joins_rooms=True)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if not batch.room:
            raise TransferError("a batch needs its room")
        return super().submit(peer, batch)


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


class EndsPolled(Telling):
    """Says that its transfers end unpolled, and sets their outcomes when they are polled."""

    capabilities = TcpBackend.capabilities


class ForgetsOffset(Ungranted):
    """Writes each block to the beginning of its region."""

    name = "wrong-forgets-offset"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.begins: dict[str, U64] = {}

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        self.begins[peer] = np.array([region.address for region in regions], np.uint64)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if peer in self.begins:
            target = self.begins[peer][batch.blocks.target_region]
            batch = batch._replace(blocks=dataclasses.replace(batch.blocks, target=target))
        return super().submit(peer, batch)


class Sends(Ungranted):
    """Reports a batch as done when it is sent. Several blocks arrive later."""

    name = "wrong-sends"

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if batch.blocks.count == 1:
            super().submit(peer, batch)
        else:
            threading.Timer(0.05, self.send, [peer, batch]).start()
        return Transfer(Outcome(True))

    def send(self, peer: str, batch: Batch) -> None:
        with contextlib.suppress(TransferError):
            super().submit(peer, batch)


class ReturnsNothing(Wrong):
    def submit(self, peer: str, batch: Batch) -> Transfer:
        super().submit(peer, batch)
        return None  # type: ignore[return-value]


class RaisesInProbe(Wrong):
    @classmethod
    def probe(cls, options: Any) -> Probe:
        raise RuntimeError("boom")


class RaisesInDiagnosis(Wrong):
    @classmethod
    def diagnose(cls, options: Any) -> list[Check]:
        raise RuntimeError("boom")


class NeedsAnObject(Wrong):
    """Has a method where a class method has to be."""

    def transports(self, options: Any) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"tcp"})


class CannotStartAlone(Wrong):
    """Has a library that does not start without a link, and says so as it may."""

    @classmethod
    def raw(cls, name: str, options: Any, host: str, regions: Sequence[Region]) -> Any:
        raise OSError("the card is busy")
