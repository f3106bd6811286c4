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


class SilentWhenQueued(Telling):
    """Fails the first transfer with a reason, and those after it without a word.

    Large ones end late, and fail if a disconnect comes before. So there are several, however fast the copies are.
    """

    late = 0.3
    large = 1 << 20
    failed = 0
    gone = False

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.ends: dict[int, float] = {}
        """When large transfers end, by their identity."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        made = super().submit(peer, batch)
        if batch.blocks.nbytes.sum() >= self.large:
            self.ends[id(made)] = time.monotonic() + self.late
        return made

    def disconnect(self, peer: str) -> None:
        self.gone = True
        super().disconnect(peer)

    def poll(self, transfers: Sequence[Transfer]) -> None:
        now = time.monotonic()
        super().poll([each for each in transfers if self.gone or self.ends.get(id(each), now) <= now])

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        self.gone = False
        super().connect(peer, descriptor, regions)

    def tell(self, outcome: Outcome) -> Outcome:
        if outcome.ok and self.gone:
            outcome = Outcome(False, "its peer was disconnected")
        self.failed += not outcome.ok
        return outcome if self.failed < 2 else outcome._replace(reason="")


class SwallowsFirst(Telling):
    """Reports the first failure as done, and tells the truth after that."""

    told = False

    def tell(self, outcome: Outcome) -> Outcome:
        told, self.told = self.told, self.told or not outcome.ok
        return outcome if told else Outcome(True)


class LossIsAnAnswer(Telling):
    """Reports what is under way as done when its peer is lost."""

    served = False

    def tell(self, outcome: Outcome) -> Outcome:
        served, self.served = self.served, outcome.ok
        return Outcome(True) if served else outcome


class DoneOnceLost(Telling):
    """Reports everything as done that goes to a peer which was lost before."""

    lost = False

    def tell(self, outcome: Outcome) -> Outcome:
        lost, self.lost = self.lost, self.lost or not outcome.ok
        return Outcome(True) if lost else outcome


class Unsettled(Telling):
    """Goes on for a while with a peer's last batch after a disconnect, and calls that batch settled.

    Attributes:
        goes_on: For how many seconds.
        says: What it says of the last batch, and of the others, when it disconnects.
    """

    goes_on = 1.0
    says: tuple[bool, bool] = (True, True)

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
                transfer.fail("the peer was disconnected", settled=self.says[transfer is not made[-1][0]])
        self.leaving[peer].start()

    def go_on(self, peer: str, batch: Batch) -> None:
        until = time.monotonic() + self.goes_on
        while time.monotonic() < until:
            transfer = TcpBackend.submit(self, peer, batch)
            while transfer.outcome is None and time.monotonic() < until:
                time.sleep(0.001)
        super().disconnect(peer)


class SettlesWhenPolled(Unsettled):
    """Says at a disconnect that nothing has settled, and says that all has when it is polled."""

    says = (False, False)
    goes_on = 2.0

    def poll(self, transfers: Sequence[Transfer]) -> None:
        super().poll(transfers)
        for transfer in transfers:
            transfer.settle()


class SettlesOneOfSeveral(Unsettled):
    """Calls settled the one batch, of those to a peer, that goes on."""

    says = (True, False)
    goes_on = 2.0


class SettledByClose(Unsettled):
    """Calls settled at its `close` what goes on for a while after it."""

    goes_on = 4.0
    closed = False

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for peer in list(self.made):
            self.disconnect(peer)
        threading.Thread(target=self.close_later, daemon=True).start()

    def close_later(self) -> None:
        for leaving in self.leaving.values():
            leaving.join()
        super().close()


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
