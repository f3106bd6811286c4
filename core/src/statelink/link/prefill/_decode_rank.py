"""One decode rank, as a prefill rank sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.backend import UNKNOWN, RegionTable
from statelink.link._diagnostics import PeerInfo
from statelink.link.peers import DECODE_RANK, RankEvent, RankState, transport_of

if TYPE_CHECKING:
    from statelink import wire
    from statelink.backend import Backend
    from statelink.link.peers import Connection, Witness
    from statelink.plan import PairPlan

__all__ = ["DecodeRank"]


class DecodeRank:
    """A decode rank that introduced itself. Any thread may read it.

    The control thread changes it, except that the job which attaches it calls `see`.

    Args:
        handshake: Who it is.
        regions: Its region table, for checks.
        backend: This side's backend.
        now: When it introduced itself.

    Attributes:
        name: Its link name.
        state: How far it is.
        plan: What this rank writes for it; set once it is attached and reachable.
        connection: This side's connection to it, once it named this rank's part.
        witness: Who can say that its process has ended, if anybody here can.
        expected: Decode ranks that ask this rank for each room.
        heard: When it was last heard.
        since: When it introduced itself.
    """

    def __init__(self, handshake: wire.Handshake, regions: RegionTable, backend: Backend, now: float) -> None:
        self.handshake = handshake
        self.regions = regions
        self.heard = now
        self.since = now
        self.state = RankState.GREETED
        self.plan: PairPlan | None = None
        self.connection: Connection | None = None
        self.witness: Witness | None = None
        self.expected = 1
        self._backend = backend
        self._told = True

    @property
    def name(self) -> str:
        """Its link name."""
        return self.handshake.link

    @property
    def exited(self) -> bool:
        """Whether it is proven that its process has ended."""
        return self.witness is not None and self.witness.ended()

    @property
    def info(self) -> PeerInfo:
        """What reasons say of it."""
        return PeerInfo(self.name, self.handshake.inventory.rank, self.heard)

    def transport(self) -> str:
        """What carries this side's bytes to it, as far as the backend can tell by now. Any thread."""
        connection = self.connection
        return transport_of(self._backend, self.name) if connection is not None and connection.made else UNKNOWN

    def step(self, event: RankEvent) -> bool:
        """Take the step that an event leads to; whether there is one from here."""
        state = DECODE_RANK[self.state].get(event)
        if state is None:
            return False
        self.state = state
        return True

    def hear(self, now: float) -> None:
        """A message of it came."""
        self.heard = now

    def count_sleep(self, late: float) -> None:
        """This process did not run for so many seconds: nobody was silent in them."""
        self.heard += late

    def answer_ping(self) -> None:
        """It was told that this side lives."""
        self._told = True

    def needs_pong(self) -> bool:
        """Whether it was not told since the last call that this side lives."""
        needed, self._told = not self._told, False
        return needed

    def connect(self, connection: Connection) -> None:
        """It has a connection of this side's backend, which may still have to be made."""
        self.connection = connection

    def see(self, witness: Witness | None) -> None:
        """Somebody here can say when its process ends."""
        self.witness = witness

    def attach(self, plan: PairPlan, expected: int) -> None:
        """It is attached: what this rank writes for it, and how many decode ranks ask for each room."""
        self.plan = plan
        self.expected = expected
