"""The decode ranks that a prefill rank serves: greeted, attached, heard of, lost."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from statelink import wire
from statelink.backend import UNKNOWN, RegionTable
from statelink.errors import MismatchError, Reason
from statelink.plan import PairPlan, compile_pair

from ._cards import Cards
from ._connections import Connection, Connections
from ._handshake import check_card
from ._mover import reason_of
from ._process import Witness
from ._stages import CONTACT, Contact, ContactEvent
from ._standing import Party
from ._transport import check_transport, transport_of

if TYPE_CHECKING:
    from ._node import Node

__all__ = ["Destination", "Destinations"]

log = logging.getLogger("statelink.link")

MAX_PEERS = 4096
"""Most decode ranks that one prefill rank serves."""


@dataclass
class Destination:
    """One decode rank that introduced itself.

    Attributes:
        name: Its link name.
        card: Who it is.
        regions: Its region table, for checks.
        stage: How far it is.
        plan: What this rank writes for it; set once it is attached and reachable.
        connection: This side's backend's to it, once it named this rank's part.
        witness: Who can say that its process has ended, if anybody here can.
        expected: Decode ranks that ask this rank for each room.
        told: Whether it was told since the last beat that this side lives.
        heard: When it was last heard.
        since: When it introduced itself.
    """

    name: str
    card: wire.Handshake
    regions: RegionTable
    heard: float
    stage: Contact = Contact.GREETED
    plan: PairPlan | None = None
    connection: Connection | None = None
    witness: Witness | None = None
    expected: int = 1
    told: bool = True
    since: float = 0.0

    def step(self, event: ContactEvent) -> bool:
        """Take the step that an event leads to; whether there is one from here."""
        stage = CONTACT[self.stage].get(event)
        if stage is None:
            return False
        self.stage = stage
        return True

    def carried(self, node: Node) -> str:
        """What carries this side's bytes to it, as far as the backend can tell by now. Any thread."""
        connection = self.connection
        return transport_of(node.backend, self.name) if connection is not None and connection.made else UNKNOWN

    @property
    def ended(self) -> bool:
        """Whether it is proven that its process has ended."""
        return self.witness is not None and self.witness.ended()

    @property
    def party(self) -> Party:
        """What reasons say of it."""
        return Party(self.name, self.card.inventory.rank, self.heard)


class Watcher(Protocol):
    """Whom `Destinations` tells what happens. Called on the control thread."""

    def lost(self, peer: Destination, why: str) -> None:
        """A destination is gone."""

    def from_destination(self, message: wire.Message, peer: Destination) -> None:
        """A message about a room."""

    def declines(self, request: wire.Request) -> bool:
        """Whether a request was never taken up; it then never will be, and its sender may be told so."""


class Destinations:
    """The decode ranks that introduced themselves. Belongs to the control thread.

    Args:
        node: The link's control thread.
        watcher: Whom to tell.
    """

    def __init__(self, node: Node, watcher: Watcher) -> None:
        self._node = node
        self._watcher = watcher
        self._destinations: dict[str, Destination] = {}
        self._cards = Cards(node)
        self._connections = Connections(node)

    def get(self, name: str) -> Destination | None:
        """The destination with this link name, if it is known."""
        return self._destinations.get(name)

    @property
    def known(self) -> list[Destination]:
        """Every destination that introduced itself and was not lost."""
        return list(self._destinations.values())

    def handle(self, message: wire.Message) -> None:
        """A message for this link."""
        peer = self._destinations.get(message.sender)
        if peer is not None:
            peer.heard = self._node.now()
        if isinstance(message, wire.Hello):
            self._hello(message)
        elif message.to != self._node.name or peer is None:
            # Spoken to an earlier process at this address, or by one that we gave up: let it start over.
            if not isinstance(message, (wire.Bye, wire.Unknown)):
                room, generation = 0, 0
                if isinstance(message, wire.Request) and self._watcher.declines(message):
                    room, generation = message.room, message.generation
                unknown = wire.Unknown(sender=self._node.name, to=message.sender, room=room, generation=generation)
                self._node.send(unknown)
        elif isinstance(message, wire.Ping):
            peer.told = True
            self._node.send(wire.Pong(sender=self._node.name, to=message.sender))
        elif isinstance(message, wire.Attach):
            self._attach(message, peer)
        elif isinstance(message, wire.Refuse):
            log.warning("%s refused this instance: %s", peer.name, message.reason)
        elif isinstance(message, wire.Bye):
            self._lose(peer, "it closed")
        else:
            self._watcher.from_destination(message, peer)

    def knows(self, name: str) -> bool:
        """See `Role.knows`."""
        return name in self._destinations

    def _hello(self, message: wire.Hello) -> None:
        ours, backend = self._node.card, self._node.backend.name

        def check(card: wire.Handshake) -> tuple[wire.Handshake, RegionTable]:
            check_card(ours, card)
            return card, RegionTable(card.inventory.regions, backend)

        def then(made: tuple[wire.Handshake, RegionTable] | None, reason: Reason | None) -> None:
            if made is not None:
                reason = self._greet(message.sender, *made)
            if reason is not None:
                log.warning("refused a peer: %s", reason)
                self._node.send(wire.Refuse(sender=self._node.name, to=message.sender, reason=reason))

        self._cards.read(message.sender, message.handshake, check, then)

    def _greet(self, sender: str, card: wire.Handshake, regions: RegionTable) -> Reason | None:
        """Welcome a peer whose card goes with ours; why not, if there are too many."""
        if card.role == "decode" and card.link not in self._destinations and card.link == sender:
            if len(self._destinations) >= MAX_PEERS:
                return Reason("peer.many", f"this link has {MAX_PEERS} peers already", {"link": self._node.name})
            now = self._node.now()
            self._destinations[card.link] = Destination(card.link, card, regions, now, since=now)
        self._node.send(wire.Welcome(sender=self._node.name, to=sender, handshake=self._node.introduction))
        return None

    def _attach(self, message: wire.Attach, peer: Destination) -> None:
        if peer.stage is Contact.ATTACHED and peer.plan is not None and peer.plan.digest == message.digest:
            self._confirm(peer, peer.plan)
            return
        peer.step(ContactEvent.ASSIGNED)
        node = self._node
        connection = peer.connection
        if connection is None:
            connection = peer.connection = self._connections.join(peer.card)

        def compile_part() -> None:
            try:
                if message.same_host and peer.witness is None:
                    peer.witness = Witness.of(peer.card.process, None)
                plan = self._compile(message, peer)
            except BaseException as error:
                failed(error)
            else:
                # In line with what is asked of the backend of this peer; compiling need not wait for that.
                node.setup.submit(("peer", peer.name), lambda: connect(plan))

        def connect(plan: PairPlan) -> None:
            try:
                self._connections.make(connection)
                check_transport(node.config.require, peer.carried(node), node.backend.name, peer.name)
            except BaseException as error:
                failed(error)
            else:
                node.post(lambda: self._attached(peer, message, plan, None))

        def failed(error: BaseException) -> None:
            reason = reason_of(error, backend=node.backend.name, peer=peer.name)
            node.post(lambda: self._attached(peer, message, None, reason))

        node.setup.submit(("plan", peer.name), compile_part)

    def _compile(self, message: wire.Attach, peer: Destination) -> PairPlan:
        ours = self._node.inventory
        theirs = peer.card.inventory
        assignment = message.assignment
        if (assignment.source, assignment.target) != (ours.rank, theirs.rank):
            raise MismatchError(
                "an assignment is for other ranks",
                cause=f"from {assignment.source} to {assignment.target}; these are {ours.rank} and {theirs.rank}",
                code="mismatch.assignment",
            )
        plan = compile_pair(ours, theirs, assignment)
        if plan.digest != message.digest:
            raise MismatchError(
                "the two sides compile different plans from one assignment",
                cause=f"{plan.digest.hex()} here, {message.digest.hex()} there",
                hint="install the same version of statelink on both sides",
                code="mismatch.digest",
            )
        return plan

    def _attached(self, peer: Destination, message: wire.Attach, plan: PairPlan | None, reason: Reason | None) -> None:
        refused = plan is None or reason is not None
        if not peer.step(ContactEvent.REFUSED if refused else ContactEvent.COMPILED):
            return
        if plan is None or reason is not None:
            log.warning("refused %s: %s", peer.name, reason)
            if reason is not None:
                self._node.send(wire.Refuse(sender=self._node.name, to=peer.name, reason=reason))
            return
        peer.plan = plan
        peer.expected = message.destinations
        self._confirm(peer, plan)

    def _confirm(self, peer: Destination, plan: PairPlan) -> None:
        transport = peer.carried(self._node)
        self._node.send(wire.Attached(sender=self._node.name, to=peer.name, digest=plan.digest, transport=transport))

    def beat(self, now: float, late: float) -> None:
        """Give up destinations that fell silent. What this process slept through is nobody's silence."""
        for peer in list(self._destinations.values()):
            peer.heard += late
            silent = now - peer.heard
            if silent > self._node.config.liveness:
                self._lose(peer, f"it has been silent for {silent:.1f} s")
                continue
            if not peer.told:  # its questions may lie behind a heap of its requests
                self._node.send(wire.Pong(sender=self._node.name, to=peer.name))
            peer.told = False

    def unreachable(self, name: str) -> None:
        """A message could not even be queued for a destination; one that is lost to it would be waited for."""
        peer = self._destinations.get(name)
        if peer is not None:
            self._lose(peer, "a message could not be sent to it")

    def _lose(self, peer: Destination, why: str) -> None:
        peer.step(ContactEvent.LOST)
        del self._destinations[peer.name]
        self._watcher.lost(peer, why)
        if peer.connection is not None:
            self._connections.leave(peer.connection)

    def close(self, loud: set[str]) -> None:
        """Say goodbye; ``loud`` are destinations to which a write may still be in flight."""
        for name in self._destinations:
            self._node.send(wire.Bye(sender=self._node.name, to=name, drained=name not in loud))

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """Every known rank: its stage, how long it has been known, and seconds since it was heard."""
        return [
            {
                "peer": peer.name,
                "rank": peer.card.inventory.rank,
                "instance": peer.card.inventory.instance,
                "state": peer.stage.value,
                "age": round(now - peer.since, 3),
                "heard": round(now - peer.heard, 3),
                "transport": peer.carried(self._node),
            }
            for peer in list(self._destinations.values())
        ]

    def snapshot(self) -> dict[str, str]:
        """Peers and how they stand. Any thread."""
        return {name: peer.stage.value for name, peer in list(self._destinations.items())}
