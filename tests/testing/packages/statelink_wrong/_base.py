"""What the wrong backends derive from: the embedded one, and the embedded one without an owner's fence."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from statelink.backend import Backend, BackendContext, Batch, Fence, Outcome, Probe, Region, Transfer
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


class Ungranted(Backend):
    """The embedded backend without an owner's fence: one grant of everything serves every batch."""

    api_version = 1
    name = "wrong-ungranted"
    Options = TcpBackend.Options
    capabilities = dataclasses.replace(TcpBackend.capabilities, source=Fence.MOVER, target=Fence.MOVER)
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
