"""Backends that are wrong, each in one way, and otherwise the embedded one."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from statelink.backend import BackendContext, Batch, Fence, Op, Outcome, Region, Side, Transfer
from statelink.errors import TransferError
from statelink.tcp import TcpBackend

U64 = Any


class Copied(Transfer):
    """A transfer whose outcome is that of another one, told otherwise."""

    def __init__(self, real: Transfer) -> None:
        super().__init__()
        self.real = real


class Telling(TcpBackend):
    """Tells of each transfer what `tell` makes of the truth."""

    def tell(self, outcome: Outcome) -> Outcome | None:
        raise NotImplementedError

    def submit(self, peer: str, batch: Batch) -> Transfer:
        return Copied(super().submit(peer, batch))

    def poll(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if isinstance(transfer, Copied) and transfer.real.outcome is not None and transfer.outcome is None:
                transfer.outcome = self.tell(transfer.real.outcome)


class Early(TcpBackend):
    name = "wrong-early"

    def submit(self, peer: str, batch: Batch) -> Transfer:
        super().submit(peer, batch)
        return Transfer(Outcome(True))


class DropsLast(TcpBackend):
    name = "wrong-drops-last"

    def submit(self, peer: str, batch: Batch) -> Transfer:
        if batch.blocks.count > 1:
            batch = batch._replace(blocks=batch.blocks[:-1])
        return super().submit(peer, batch)


class GrantsAll(TcpBackend):
    """Ignores what is granted, and looks only at the room."""

    name = "wrong-grants-all"
    regions: Sequence[Region] = ()

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.regions = regions

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        super().grant(peer, room, generation, addresses, nbytes)
        table = sorted((region.address, region.nbytes) for region in self.regions)
        everything = np.array(table, np.uint64).reshape(-1, 2).T
        super().grant(peer, room, generation, everything[0].copy(), everything[1].copy())


class TooFar(GrantsAll):
    """Writes one byte too far."""

    name = "wrong-too-far"

    def submit(self, peer: str, batch: Batch) -> Transfer:
        longer = batch.blocks.nbytes.copy()
        longer[-1] += np.uint64(longer[-1] > 50)
        try:
            return super().submit(peer, batch._replace(blocks=dataclasses.replace(batch.blocks, nbytes=longer)))
        except TransferError:
            return super().submit(peer, batch)


class AnyRoom(GrantsAll):
    """Lets a peer write for rooms that it was never granted."""

    name = "wrong-any-room"

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        first = self.regions[:1]
        if first:
            one = np.array([first[0].address], np.uint64), np.array([1], np.uint64)
            for room in (1, 12):
                super().grant(peer, room, 1, *one)


class KeepsGrants(TcpBackend):
    """Says that a grant is taken back, and lets the peer go on."""

    name = "wrong-keeps-grants"

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        return Transfer(Outcome(True))


class ReplacesGrants(TcpBackend):
    """Forgets what a use of a room was granted before."""

    name = "wrong-replaces-grants"

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        super().revoke(peer, room, generation)
        super().grant(peer, room, generation, addresses, nbytes)


class RevokesLast(TcpBackend):
    """Takes back the last of several grants, and says that all are."""

    name = "wrong-revokes-last"

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

    name = "wrong-swallows"

    def tell(self, outcome: Outcome) -> Outcome:
        return Outcome(True)


class Silent(Telling):
    """Fails without a word."""

    name = "wrong-silent"

    def tell(self, outcome: Outcome) -> Outcome:
        return outcome if outcome.ok else outcome._replace(reason="")


class Hangs(Telling):
    """Never tells of a failure."""

    name = "wrong-hangs"

    def tell(self, outcome: Outcome) -> Outcome | None:
        return outcome if outcome.ok else None


class Unsettled(TcpBackend):
    """Calls what goes on settled."""

    name = "wrong-settled"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.last: dict[str, tuple[list[Transfer], Batch]] = {}

    def submit(self, peer: str, batch: Batch) -> Transfer:
        made, _ = self.last.setdefault(peer, ([], batch))
        real = super().submit(peer, batch)
        if batch.blocks.total < 1 << 23:
            return real
        made.append(Transfer())
        return made[-1]

    def poll(self, transfers: Sequence[Transfer]) -> None:
        for made, _ in self.last.values():
            for transfer in made:
                transfer.outcome = transfer.outcome or Outcome(True)

    def disconnect(self, peer: str) -> None:
        made, batch = self.last.pop(peer, ([], None))
        for transfer in made:
            transfer.fail("the peer was disconnected", settled=True)
        if not made:
            super().disconnect(peer)
            return

        def go_on() -> None:
            until = time.monotonic() + 0.2
            while time.monotonic() < until and batch is not None:
                transfer = super(Unsettled, self).submit(peer, batch)
                while transfer.outcome is None and time.monotonic() < until:
                    time.sleep(0.001)
            super(Unsettled, self).disconnect(peer)

        threading.Thread(target=go_on, daemon=True).start()


class LeaksThreads(TcpBackend):
    name = "wrong-leaks-threads"

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeaksFiles(TcpBackend):
    name = "wrong-leaks-files"

    def close(self) -> None:
        super().close()
        os.dup(0)


class LeaksMemory(TcpBackend):
    name = "wrong-leaks-memory"
    kept: list[bytearray] = []  # noqa: RUF012 - shared on purpose

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        self.kept.append(bytearray(b"x") * (1 << 20))


class TakesGarbage(TcpBackend):
    name = "wrong-takes-garbage"

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        try:
            super().connect(peer, descriptor, regions)
        except TransferError:
            if peer != "stranger":
                raise


class Crashes(TcpBackend):
    """Raises what is no error of Statelink's."""

    name = "wrong-crashes"

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        assert descriptor[:5] == b"SLTCP"
        super().connect(peer, descriptor, regions)


class Unchecked(TcpBackend):
    """Moves whatever it is told."""

    name = "wrong-unchecked"

    def _wrong(self, *_: Any) -> str:
        return ""


class ClosesOnce(TcpBackend):
    name = "wrong-closes-once"
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed already")
        self.is_closed = True
        super().close()


class TakesReads(TcpBackend):
    name = "wrong-takes-reads"

    def submit(self, peer: str, batch: Batch) -> Transfer:
        return Transfer(Outcome(True)) if batch.op is Op.READ else super().submit(peer, batch)


class TakesAnyKind(TcpBackend):
    name = "wrong-takes-any-kind"

    def register(self, regions: Sequence[Region]) -> None:
        super().register([Region(region.address, region.nbytes) for region in regions])


class HidesFence(TcpBackend):
    """Declares a fence that is not the one it has."""

    name = "wrong-hides-fence"
    capabilities = dataclasses.replace(
        TcpBackend.capabilities,
        fences=MappingProxyType({(Op.WRITE, Side.SOURCE): Fence.MOVER, (Op.WRITE, Side.TARGET): Fence.MOVER}),
    )


class ForgetsPeers(TcpBackend):
    """Cannot connect a peer again."""

    name = "wrong-forgets-peers"

    def disconnect(self, peer: str) -> None:
        super().disconnect(peer)
        self.seen = {*getattr(self, "seen", ()), peer}

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        if peer in getattr(self, "seen", ()):
            raise TransferError("this peer was here before")
        super().connect(peer, descriptor, regions)
