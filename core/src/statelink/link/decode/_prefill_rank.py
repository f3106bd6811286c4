"""One prefill rank, as a decode rank sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.backend import UNKNOWN
from statelink.link._diagnostics import PeerInfo

if TYPE_CHECKING:
    from statelink.link.peers import Connection, Witness
    from statelink.plan import PairPlan
    from statelink.wire import Endpoint, Handshake

    from ._route import Part

__all__ = ["PrefillRank"]


class PrefillRank:
    """A rank of a prefill instance, at an address. The control thread changes it; any thread may read it.

    Args:
        endpoint: Where it is dialled.
        now: When that began.

    Attributes:
        handshake: Who it is, once it answered.
        heard: When it was last heard.
        part: What it does for this decode rank, if anything.
        attached: Whether it confirmed its part.
        connected: Whether it can reach this side's backend.
        connection: This side's connection to it, while it has a part.
        witness: Who can say that its process has ended, if anybody here can.
        transport: What its backend says carries its bytes.
    """

    def __init__(self, endpoint: Endpoint, now: float) -> None:
        self.endpoint = endpoint
        self.heard = now
        self.handshake: Handshake | None = None
        self.part: Part | None = None
        self.attached = False
        self.connected = False
        self.connection: Connection | None = None
        self.witness: Witness | None = None
        self.transport = UNKNOWN

    @property
    def name(self) -> str:
        """Its link name; empty while it is not known."""
        return self.handshake.link if self.handshake else ""

    @property
    def rank(self) -> int | None:
        """Its rank, once it answered."""
        return self.handshake.inventory.rank if self.handshake else None

    @property
    def address(self) -> str:
        """The address that it was dialled at."""
        return str(self.endpoint)

    @property
    def plan(self) -> PairPlan | None:
        """The compiled part, if it has one."""
        return self.part.plan if self.part else None

    @property
    def exited(self) -> bool:
        """Whether it is proven that its process has ended."""
        return self.witness is not None and self.witness.ended()

    @property
    def info(self) -> PeerInfo:
        """What reasons say of it."""
        if self.handshake is None:
            return PeerInfo(self.endpoint.address, None, None)
        return PeerInfo(self.name, self.rank, self.heard)

    def answer(self, handshake: Handshake, now: float) -> None:
        """It said who it is."""
        self.handshake, self.heard = handshake, now

    def hear(self, now: float) -> None:
        """A message of it came."""
        self.heard = now

    def count_sleep(self, late: float) -> None:
        """This process did not run for so many seconds: nobody was silent in them."""
        self.heard += late

    def assign(self, part: Part) -> bool:
        """Give it a part, which it has yet to confirm; whether it had one before."""
        known = self.part is not None
        self.part, self.attached = part, False
        return known

    def connect(self, connection: Connection) -> None:
        """It has a connection of this side's backend, which may still have to be made."""
        self.connection = connection

    def reach(self, witness: Witness | None) -> None:
        """The connection is made, and it may be told its part."""
        self.connected = True
        self.witness = witness

    def confirm(self) -> None:
        """It confirmed its part."""
        self.attached = True

    def carry_by(self, transport: str) -> None:
        """Its backend says what carries its bytes."""
        self.transport = transport

    def detach(self) -> Connection | None:
        """Give up its part; the connection that nobody here counts on then."""
        self.part, self.attached, self.connected = None, False, False
        connection, self.connection = self.connection, None
        return connection
