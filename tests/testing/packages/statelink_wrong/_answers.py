"""Backends that declare, answer or refuse something wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from statelink.backend import BackendContext, Batch, Check, Fence, Probe, Region, Transfer
from statelink.errors import TransferError
from statelink.tcp import TcpBackend

from ._base import Wrong


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


class ClosesOnce(Wrong):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed already")
        self.is_closed = True
        super().close()


class ConnectsWhenClosed(Wrong):
    """Takes new peers after its `close`."""

    is_closed = False

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        if not self.is_closed:
            super().connect(peer, descriptor, regions)

    def close(self) -> None:
        self.is_closed = True
        super().close()


class KeepsOldTable(Wrong):
    """Keeps the region table of the first `connect`, until the peer is disconnected."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.tables: dict[str, Sequence[Region]] = {}

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        first = self.tables.get(peer, regions)
        super().connect(peer, descriptor, first)  # which disconnects the peer, if it is connected
        self.tables[peer] = first

    def disconnect(self, peer: str) -> None:
        super().disconnect(peer)
        self.tables.pop(peer, None)


class TakesAnyKind(Wrong):
    def register(self, regions: Sequence[Region]) -> None:
        super().register([Region(region.address, region.nbytes) for region in regions])


class HidesFence(Wrong):
    """Declares a fence that is not the one it has."""

    capabilities = dataclasses.replace(
        TcpBackend.capabilities,
        source=Fence.MOVER,
        target=Fence.MOVER,
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


class TransportIsNumber(Wrong):
    """Says a number where the transport's name has to be, once bytes have moved."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        self.moved = True
        return super().submit(peer, batch)

    def transport(self, peer: str) -> str:
        wrong: Any = 42
        return wrong if getattr(self, "moved", False) else super().transport(peer)


class TransportIsOther(Wrong):
    """Says that it could use sockets, and that it uses something else with them."""

    def transport(self, peer: str) -> str:
        return "socket+pigeon"


class TransportRaises(Wrong):
    def transport(self, peer: str) -> str:
        raise RuntimeError("boom")


class RefusesStrangers(Wrong):
    """Raises where a peer is disconnected that it does not know."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.known: set[str] = set()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        self.known.add(peer)

    def disconnect(self, peer: str) -> None:
        self.known.remove(peer)
        super().disconnect(peer)


class NeedsAnAnswer(Wrong):
    """Raises where a peer is disconnected that has taken no batch."""

    served: frozenset[str] = frozenset()

    def submit(self, peer: str, batch: Batch) -> Transfer:
        self.served |= {peer}
        return super().submit(peer, batch)

    def disconnect(self, peer: str) -> None:
        if peer not in self.served:
            raise TransferError("this peer has never taken a batch")
        super().disconnect(peer)


class OutcomeIsTrue(Wrong):
    """Says `True` where an `Outcome` has to be."""

    capabilities = dataclasses.replace(TcpBackend.capabilities, ends_unpolled=False)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        made = super().submit(peer, batch)
        while made.outcome is None:
            time.sleep(0.001)
        wrong: Any = made.outcome.ok
        return Transfer(wrong)


class DescribesAsText(Wrong):
    def descriptor(self) -> bytes:
        return super().descriptor().hex()  # type: ignore[return-value]


class NamesNoType(Wrong):
    """Declares a state type that there is not."""

    capabilities = dataclasses.replace(TcpBackend.capabilities, state_types=frozenset({"kv", "kvv"}))
