"""One decode rank, as a prefill rank sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.backend import UNKNOWN, RegionTable
from statelink.link._diagnostics import PeerInfo
from statelink.link.peers import DECODE_RANK, Carrier, RankEvent, RankState, tells_transport, transport_of

if TYPE_CHECKING:
    from statelink import wire
    from statelink.backend import Backend
    from statelink.link.peers import Connection, Witness
    from statelink.plan import PairPlan

    from ._line import Line

__all__ = ["DecodeRank"]


class DecodeRank:
    """A decode rank that introduced itself. Any thread may read it.

    The control thread changes it, except that the job which attaches it sets the witness, on a data thread.

    Args:
        handshake: Its handshake.
        regions: Its region table, for checks.
        backend: This side's backend.
        now: When it introduced itself.

    Attributes:
        name: Its link name.
        state: How far it is.
        asked: The part that it named last.
        plan: What this rank writes for it; set once it is attached and the backend reaches it.
        connection: This side's connection to it, once it named this rank's part.
        line: The pushes to it; set with the plan.
        witness: Tells whether its process has ended; ``None`` where that cannot be seen from here.
        expected: Decode ranks of its instance that ask this rank for each room; before it is attached, all of them.
        heard: When its last message came.
        since: When it introduced itself.
        has_pong: Whether a Pong was sent to it since the last heartbeat.
    """

    def __init__(self, handshake: wire.Handshake, regions: RegionTable, backend: Backend, now: float) -> None:
        self.handshake = handshake
        self.name = handshake.link
        self.regions = regions
        self.heard = now
        self.since = now
        self.state = RankState.GREETED
        self.asked: wire.Attach | None = None
        self.plan: PairPlan | None = None
        self.connection: Connection | None = None
        self.witness: Witness | None = None
        self.line: Line | None = None
        self.expected = handshake.inventory.ranks
        self._backend = backend
        self.has_pong = True

    @property
    def exited(self) -> bool:
        """Whether it is proven that its process has ended."""
        return self.witness is not None and self.witness.ended()

    @property
    def info(self) -> PeerInfo:
        """What diagnostics say of it."""
        return PeerInfo(self.name, self.handshake.inventory.rank, self.heard)

    def transport(self) -> str:
        """The transport that carries this side's bytes to it, as far as the backend knows it. Any thread."""
        return self.carrier().transport

    def carrier(self) -> Carrier:
        """The same, with what is wrong with the backend's answer. Any thread."""
        connection = self.connection
        made = connection is not None and connection.made
        return transport_of(self._backend, self.name) if made else Carrier(UNKNOWN)

    def finds_out(self) -> bool:
        """Whether the backend tells the transport, and does not know it yet. Any thread."""
        return self.transport() == UNKNOWN and tells_transport(type(self._backend))

    def step(self, event: RankEvent) -> bool:
        """Take the step that an event leads to. Returns whether the table has one for the present state."""
        state = DECODE_RANK[self.state].get(event)
        if state is None:
            return False
        self.state = state
        return True

    def count_sleep(self, late: float) -> None:
        """Do not count the seconds for which this process did not run as silence of the rank."""
        self.heard += late

    def needs_pong(self) -> bool:
        """Whether it got no Pong since the last call of this method."""
        needed, self.has_pong = not self.has_pong, False
        return needed

    def attach(self, plan: PairPlan, expected: int, line: Line) -> None:
        """Note that it is attached.

        Args:
            plan: What this rank writes for it.
            expected: Decode ranks of its instance that ask this rank for each room.
            line: Takes the pushes to it, unless it was attached before.
        """
        self.line = self.line or line
        self.plan = plan
        self.expected = expected
