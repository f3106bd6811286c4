"""Backends that say that no call waits for a peer, or that one holds no other, and are wrong."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from statelink.backend import SubmitMode
from statelink.tcp import TcpBackend

from ._base import Copied, Telling
from ._ends import Waiting

if TYPE_CHECKING:
    from statelink.backend import BackendContext, Batch, Transfer


class AsyncWaits(Waiting):
    """Waits in `submit` until the peer has the bytes, and says that it does not."""

    capabilities = TcpBackend.capabilities


class ClosesWhenDone(Telling):
    """Waits in `close` for every transfer that is under way."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.running: list[Transfer] = []

    def submit(self, peer: str, batch: Batch) -> Transfer:
        made = TcpBackend.submit(self, peer, batch)
        self.running.append(made)
        return Copied(made)

    def close(self) -> None:
        while any(transfer.outcome is None for transfer in self.running):
            time.sleep(0.01)
        super().close()


class OneAtATime(Waiting):
    """Says that eight calls may hang, and holds one lock in all of them."""

    capabilities = dataclasses.replace(
        TcpBackend.capabilities, submit_mode=SubmitMode.BLOCKING, stalled_peers=8, ends_unpolled=False
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.one = threading.Lock()

    def submit(self, peer: str, batch: Batch) -> Transfer:
        with self.one:
            return super().submit(peer, batch)
