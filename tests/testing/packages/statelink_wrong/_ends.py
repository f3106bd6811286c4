"""Backends that say something wrong about the end of a transfer."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

from statelink.backend import BackendContext, Batch, Outcome, Region, SubmitMode, Transfer
from statelink.errors import TransferError
from statelink.tcp import TcpBackend

from ._base import Telling


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


class EndsPolled(Telling):
    """Says that its transfers end unpolled, and sets their outcomes when they are polled."""

    capabilities = TcpBackend.capabilities
