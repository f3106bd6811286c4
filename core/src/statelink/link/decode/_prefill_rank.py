"""One prefill rank, as a decode rank sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.backend import UNKNOWN
from statelink.link._diagnostics import PeerInfo

if TYPE_CHECKING:
    from statelink.link.peers import Connection, Witness
    from statelink.plan import PairPlan
    from statelink.wire import Bye, Endpoint, Handshake

    from ._part import Part

__all__ = ["PrefillRank"]


class PrefillRank:
    """A rank of a prefill instance, at an address. The control thread changes it; any thread may read it.

    Args:
        endpoint: Where it is dialled.
        now: When dialling began.

    Attributes:
        endpoint: Where it is dialled.
        address: The same, as text.
        handshake: Its handshake, once it answered.
        name: Its link name; empty while it is not known.
        heard: When its last message came; before the first one, when dialling began.
        part: What it writes for this decode rank, if anything.
        attached: Whether it confirmed its part.
        connected: Whether this side's backend is connected to it.
        connection: This side's connection to it, while it has a part.
        witness: Tells whether its process has ended; ``None`` where that cannot be seen from here.
        transport: The transport that its backend says carries its bytes.
    """

    def __init__(self, endpoint: Endpoint, now: float) -> None:
        self.endpoint = endpoint
        self.address = str(endpoint)
        self.heard = now
        self._spoke = False
        self.handshake: Handshake | None = None
        self.name = ""
        self.part: Part | None = None
        self.attached = False
        self.connected = False
        self.connection: Connection | None = None
        self.witness: Witness | None = None
        self.transport = UNKNOWN

    @property
    def rank(self) -> int | None:
        """Its rank, once it answered."""
        return self.handshake.inventory.rank if self.handshake else None

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
        """What diagnostics say of it."""
        if self.handshake is None:
            return PeerInfo(self.endpoint.address, None, self.heard if self._spoke else None)
        return PeerInfo(self.name, self.rank, self.heard)

    def may_leave(self, bye: Bye) -> bool:
        """Whether a goodbye of it is up to date. If not, it has come back before the goodbye came."""
        return self.handshake is None or bye.registration >= self.handshake.registration

    def answer(self, handshake: Handshake, now: float) -> None:
        """Note its handshake."""
        self.handshake, self.name, self.heard = handshake, handshake.link, now

    def hear(self, now: float) -> None:
        """A message of it came."""
        self.heard, self._spoke = now, True

    def count_sleep(self, late: float) -> None:
        """Do not count the seconds for which this process did not run as silence of the rank."""
        self.heard += late

    def assign(self, part: Part) -> bool:
        """Give it a part, which it has yet to confirm. Returns whether it had one before."""
        known = self.part is not None
        self.part, self.attached = part, False
        return known

    def reach(self, witness: Witness | None) -> None:
        """Note that the connection is made, and set the witness. `Attach` may be sent to it now."""
        self.connected = True
        self.witness = witness

    def detach(self) -> Connection | None:
        """Take its part away. Returns its connection, which the caller has to leave."""
        self.part, self.attached, self.connected = None, False, False
        connection, self.connection = self.connection, None
        return connection
