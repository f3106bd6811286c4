"""Backends that say that no call waits for a peer, or that one holds no other, and are wrong."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from statelink.backend import SubmitMode, Transfer
from statelink.tcp import TcpBackend

from ._base import Copied, Telling
from ._ends import Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelink.backend import BackendContext, Batch


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


class LargestFirst(Telling):
    """Keeps what it is given, and moves the largest batch first, one after the other."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.waiting: list[tuple[int, int, str, Batch, Copied]] = []
        self.moving: Transfer | None = None
        self.number = 0

    def submit(self, peer: str, batch: Batch) -> Transfer:
        made = Copied(Transfer())
        self.number += 1
        self.waiting.append((-batch.blocks.total, self.number, peer, batch, made))
        self.go_on()
        return made

    def go_on(self) -> None:
        if self.waiting and (self.moving is None or self.moving.outcome is not None):
            first = min(self.waiting)
            self.waiting.remove(first)
            *_, peer, batch, made = first
            self.moving = made.real = TcpBackend.submit(self, peer, batch)

    def poll(self, transfers: Sequence[Transfer]) -> None:
        super().poll(transfers)
        self.go_on()


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
