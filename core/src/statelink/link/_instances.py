"""Finding, greeting and attaching prefill instances, and noticing when they are gone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from statelink import wire
from statelink.backend import UNKNOWN
from statelink.errors import ConfigError, PeerError, Reason

from ._cards import Cards
from ._connections import Connections
from ._handshake import check_card
from ._instance import Instance, Route, Source, plan_instance
from ._mover import reason_of
from ._process import Witness
from ._stages import InstanceEvent, Stage
from ._transport import check_transport
from ._unanswered import Unanswered

if TYPE_CHECKING:
    from ._node import Node
    from ._rendezvous import Peer

__all__ = ["Instances", "Watcher"]

log = logging.getLogger("statelink.link")

RETRY_REFUSED = 10.0
"""Seconds after which a refused instance is asked again."""
REDIAL = 4
"""Introductions that may wait in the connection to who does not answer."""
RETRY_RESOLVE = 0.5
"""Seconds between questions to the rendezvous about an instance that is not complete."""


class Watcher(Protocol):
    """Whom `Instances` tells what happens. Called on the control thread."""

    def ready(self, instance: Instance) -> None:
        """Rooms may be requested."""

    def refused(self, instance: Instance, reason: Reason) -> None:
        """One side refused."""

    def lost(self, instance: Instance, source: Source, why: str) -> None:
        """A rank is gone; the instance is about to be greeted anew."""

    def untaken(self, room: int, generation: int, source: Source) -> None:
        """A request reached a process that does not know this link: nobody took it."""

    def goodbye(self, source: Source) -> None:
        """A rank closes, and none of its writes can land any more."""

    def from_source(self, message: wire.Message, source: Source) -> None:
        """A message about a room."""


class Instances:
    """The prefill instances that this decode rank knows. Belongs to the control thread.

    Args:
        node: The link's control thread.
        watcher: Whom to tell.
    """

    def __init__(self, node: Node, watcher: Watcher) -> None:
        self._node = node
        self._watcher = watcher
        self._instances: dict[str, Instance] = {}
        self._cards = Cards(node)
        self._unanswered = Unanswered(node)
        self.explain = self._unanswered.explain
        self._connections = Connections(node)
        self._siblings = [str(wire.parse_endpoint(address)) for address in node.config.siblings]

    def get(self, peer: Peer) -> Instance:
        """The instance that the engine or router calls ``peer``; found and greeted in the background."""
        key = peer if isinstance(peer, str) else ",".join(peer)
        instance = self._instances.get(key)
        if instance is None:
            instance = self._instances[key] = Instance(key, peer, self._node.now())
            self._resolve(instance)
        else:
            self._retry(instance)
        return instance

    def _retry(self, instance: Instance) -> None:
        """Ask a refused instance again, after a while: it may have been restarted with another configuration."""
        if instance.stage is Stage.REFUSED and self._node.now() - instance.since > RETRY_REFUSED:
            self._hang_up(instance)
            self._step(instance, InstanceEvent.RETRIED)
            self._resolve(instance)

    def _step(self, instance: Instance, event: InstanceEvent) -> bool:
        return instance.step(event, self._node.now())

    def _resolve(self, instance: Instance) -> None:
        instance.reason = None
        node = self._node

        def job() -> None:
            try:
                found = node.rendezvous.resolve(instance.peer)
                siblings = self._find_siblings()
            except BaseException as error:
                reason = reason_of(error)
                node.post(lambda: self._refuse(instance, reason))
            else:
                if found is None or siblings is None:
                    node.post(lambda: node.after(RETRY_RESOLVE, lambda: self._resolve(instance)))
                else:
                    node.post(lambda: self._greet(instance, found, siblings))

        node.setup.submit(("resolve", instance.key), job)

    def _find_siblings(self) -> list[str] | None:
        """Addresses of this instance's other ranks; ``None`` while they are not all there. Blocks; a setup thread's."""
        node = self._node
        if node.inventory.ranks == 1 or node.config.siblings or not node.config.rendezvous:
            return self._siblings
        own = node.rendezvous.resolve(node.inventory.instance)
        return None if own is None else [str(each) for each in own if each != node.channel.endpoint]

    def _greet(self, instance: Instance, endpoints: tuple[wire.Endpoint, ...], siblings: list[str]) -> None:
        if not self._step(instance, InstanceEvent.FOUND):
            return
        self._siblings = siblings
        now = self._node.now()
        instance.sources = {str(endpoint): Source(endpoint, now) for endpoint in endpoints}
        instance.siblings = dict.fromkeys(self._siblings)
        instance.asked = 0
        try:
            for address in (*instance.sources, *instance.siblings):
                self._node.channel.dial(wire.parse_endpoint(address))
        except ConfigError as error:
            self._refuse(instance, error.reason)
            return
        self._hello(instance)

    def _hello(self, instance: Instance) -> None:
        """Introduce ourselves to everybody who has not answered; to who stays silent, less and less often."""
        beat, longest = self._node.config.heartbeat, self._node.config.liveness / 2
        instance.ask_at = self._node.now() + min(beat * 2 ** min(instance.asked, 16), longest)
        instance.asked += 1
        if instance.asked % REDIAL == 0:
            for address in instance.unanswered:
                self._redial(address)
        hello = wire.Hello(sender=self._node.name, handshake=self._node.introduction)
        for address in instance.unanswered:
            self._node.send(hello, address)

    def _redial(self, address: str) -> None:
        """Drop what waits for who does not answer: cards are large, and one is enough."""
        if all(each.stage is Stage.GREETING for each in self._of_address(address)):
            self._node.channel.redial(wire.parse_endpoint(address))

    def _welcome(self, message: wire.Welcome, address: str) -> None:
        if not any(each.stage is Stage.GREETING for each in self._of_address(address)):
            return
        ours = self._node.card

        def check(card: wire.Handshake) -> wire.Handshake:
            if card.link != message.sender:
                raise PeerError("a peer describes itself as another", cause=f"{card.link!r:.80}", code="peer.name")
            check_card(ours, card)
            return card

        self._cards.read(address, message.handshake, check, lambda card, reason: self._met(address, card, reason))

    def _met(self, address: str, card: wire.Handshake | None, reason: Reason | None) -> None:
        """Who listens at an address has said who it is."""
        for instance in self._of_address(address):
            if instance.stage is not Stage.GREETING:
                continue
            source = instance.sources.get(address)
            if card is not None and source is not None and card.role != "prefill":
                what, cause = "a peer is not a prefill rank", f"its role is {card.role!r}"
                reason = Reason("peer.role", what, {"peer": card.link}, cause)
            if card is None or reason is not None:
                assert reason is not None
                self._refuse(instance, reason)
                continue
            if source is not None:
                source.card, source.heard = card, self._node.now()
            else:
                instance.siblings[address] = card
            if instance.greeted:
                self._plan(instance)

    def _plan(self, instance: Instance) -> None:
        self._step(instance, InstanceEvent.ANSWERED)
        turn = instance.turn
        node = self._node
        sources = {address: source.card for address, source in instance.sources.items() if source.card}
        siblings = [card for card in instance.siblings.values() if card]

        def job() -> None:
            try:
                found = plan_instance(node.card, siblings, sources)
            except BaseException as error:
                reason = reason_of(error, backend=node.backend.name, peer=instance.key)
                node.post(lambda: self._refuse(instance, reason, tell=True))
            else:
                node.post(lambda: self._attach(instance, found, turn))

        node.setup.submit(("plan", instance.key), job)

    def _attach(self, instance: Instance, found: Route, turn: int) -> None:
        if instance.turn != turn:
            return  # a rank was lost meanwhile, and all is planned anew
        self._step(instance, InstanceEvent.ROUTED)
        for address, source in instance.sources.items():
            part = found.parts.get(address)
            if part is None:
                self._detach(source)
                continue
            assignment, plan, readers = part
            if source.plan is not None and source.plan.digest == plan.digest and source.attached:
                continue  # another rank came back; this one's part is what it was
            known = source.assignment is not None
            source.assignment, source.plan, source.readers, source.attached = assignment, plan, readers, False
            if known:
                self._tell_part(source)
            else:
                self._connect(instance, source)
        self._maybe_ready(instance)

    def _tell_part(self, source: Source) -> None:
        """Tell a rank its part; said again until it confirms, since messages are lost where connections break."""
        assert source.assignment is not None
        assert source.plan is not None
        attach = wire.Attach(
            sender=self._node.name,
            to=source.name,
            assignment=source.assignment,
            destinations=source.readers,
            digest=source.plan.digest,
            same_host=source.witness is not None,
        )
        self._node.send(attach, source.address)

    def _connect(self, instance: Instance, source: Source) -> None:
        """Let our backend know the source; it is told its part afterwards, so that its backend finds ours ready."""
        node = self._node
        card = source.card
        assert card is not None
        connection = source.connection = self._connections.join(card)
        witness: list[Witness | None] = []

        def job() -> None:
            try:
                witness.append(Witness.of(card.process, source.endpoint.address))
                self._connections.make(connection)
            except BaseException as error:
                reason = reason_of(error, backend=node.backend.name, peer=card.link)
                node.post(lambda: self._refuse(instance, reason, tell=True))
            else:
                node.post(done)

        def done() -> None:
            if source.connection is connection:
                source.connected = True
                source.witness = witness[0]
                self._tell_part(source)
                self._maybe_ready(instance)

        node.setup.submit(("peer", card.link), job)

    def _maybe_ready(self, instance: Instance) -> None:
        if instance.stage is Stage.ATTACHING and all(s.attached and s.connected for s in instance.parts):
            self._step(instance, InstanceEvent.CONFIRMED)
            self._watcher.ready(instance)

    def _refuse(self, instance: Instance, reason: Reason, *, tell: bool = False) -> None:
        """These instances cannot work together: its rooms fail with the reason, on both sides."""
        if not self._step(instance, InstanceEvent.REFUSED):
            return
        log.warning("refused prefill instance %s: %s", instance.key, reason)
        instance.reason = reason
        for each in instance.parts:
            self._detach(each)
        for address, source in instance.sources.items():
            if tell and source.card is not None:
                self._node.send(wire.Refuse(sender=self._node.name, to=source.name, reason=reason), address)
        self._watcher.refused(instance, reason)

    def _lose(self, instance: Instance, source: Source, why: str) -> None:
        """A rank is gone: the rooms that it owed something fail, and it is greeted anew while the others go on."""
        if not self._step(instance, InstanceEvent.LOST):
            return
        self._watcher.lost(instance, source, why)
        self._detach(source)
        if not instance.rooms:
            self._drop(instance)
            return
        address = source.address
        if self._of_address(address) == [instance]:
            self._node.channel.redial(source.endpoint)
        instance.sources[address] = Source(source.endpoint, self._node.now())
        instance.siblings = dict.fromkeys(self._siblings)
        instance.asked = 0
        self._hello(instance)

    def _drop(self, instance: Instance) -> None:
        """Forget an instance that nobody waits for; it is found anew when somebody does."""
        self._step(instance, InstanceEvent.DROPPED)
        for each in instance.parts:
            self._detach(each)
        self._hang_up(instance)
        self._unanswered.forget(instance)
        del self._instances[instance.key]

    def _detach(self, source: Source) -> None:
        """Give up a rank's part, and its connection with it."""
        if source.assignment is not None:
            source.assignment, source.plan, source.attached, source.connected = None, None, False, False
        if source.connection is not None:
            self._connections.leave(source.connection)
            source.connection = None

    def _hang_up(self, instance: Instance) -> None:
        """Close the connections that no other instance uses."""
        for address in (*instance.sources, *instance.siblings):
            others = [each for each in self._of_address(address) if each is not instance]
            if not others:
                self._node.channel.hang_up(address)

    # Messages.

    def handle(self, message: wire.Message, address: str | None) -> None:
        """A message for this link; ``address`` is where its sender was dialled, if it was."""
        if address is None:
            self._answer_sibling(message)
            return
        if isinstance(message, wire.Welcome):
            self._welcome(message, address)
            return
        for instance in self._of_address(address):
            source = instance.sources.get(address)
            if source is None:
                continue
            if isinstance(message, wire.Unknown):
                if message.room:
                    self._watcher.untaken(message.room, message.generation, source)
                if source.card is not None and instance.stage is not Stage.REFUSED:
                    self._lose(instance, source, "it does not know this link: it was restarted, or gave it up")
            elif isinstance(message, wire.Refuse):
                self._refuse(instance, message.reason)
            elif message.sender == source.name and message.to == self._node.name:
                source.heard = self._node.now()
                instance.suspect = False
                self._from_source(message, instance, source)

    def _answer_sibling(self, message: wire.Message) -> None:
        if not isinstance(message, wire.Hello):
            return
        ours = self._node.card

        def then(_: None, reason: Reason | None) -> None:
            answer: wire.Message = wire.Welcome(
                sender=self._node.name, to=message.sender, handshake=self._node.introduction
            )
            if reason is not None:
                answer = wire.Refuse(sender=self._node.name, to=message.sender, reason=reason)
            self._node.send(answer)

        self._cards.read(message.sender, message.handshake, lambda card: check_card(ours, card), then)

    def _from_source(self, message: wire.Message, instance: Instance, source: Source) -> None:
        if isinstance(message, wire.Attached):
            if source.plan is not None and message.digest == source.plan.digest:
                self._attached(instance, source, message.transport or UNKNOWN)
        elif isinstance(message, wire.Bye):
            if message.drained:
                self._watcher.goodbye(source)
            self._lose(instance, source, "it closed")
        else:
            self._watcher.from_source(message, source)

    def _attached(self, instance: Instance, source: Source, transport: str) -> None:
        source.transport = transport
        try:
            check_transport(self._node.config.require, transport, self._node.backend.name, source.name)
        except PeerError as error:
            self._refuse(instance, error.reason, tell=True)
            return
        source.attached = True
        self._maybe_ready(instance)

    # Time.

    def beat(self, now: float, late: float) -> None:
        """Ask who is silent, and give up who stays so. What this process slept through is nobody's silence."""
        liveness = self._node.config.liveness
        for instance in list(self._instances.values()):
            self._unanswered.look(instance, now)
            if instance.stage is Stage.REFUSED and instance.rooms:
                # Memory of these rooms waits for its word that nothing is in flight.
                self._retry(instance)
            elif instance.stage is Stage.REFUSED and now - instance.since > RETRY_REFUSED:
                self._drop(instance)
            if instance.stage in (Stage.RESOLVING, Stage.REFUSED, Stage.GONE):
                continue
            if instance.stage is Stage.GREETING:
                if not instance.rooms:
                    self._drop(instance)
                    continue
                if now >= instance.ask_at:
                    self._hello(instance)
            for source in list(instance.sources.values()):
                if source.card is None:
                    continue
                source.heard += late
                silent = now - source.heard
                if source.ended:
                    self._lose(instance, source, "its process has ended")
                    break
                if silent > liveness:
                    self._lose(instance, source, f"it has been silent for {silent:.1f} s")
                    break
                instance.suspect = instance.suspect or silent > liveness / 2
                self._node.send(wire.Ping(sender=self._node.name, to=source.name), source.address)
            for source in instance.parts:
                if instance.stage is Stage.ATTACHING and source.connected and not source.attached:
                    self._tell_part(source)
            if instance.stage is Stage.READY and not instance.suspect:
                self._watcher.ready(instance)

    def close(self) -> None:
        """Say goodbye."""
        for instance in self._instances.values():
            for address, source in instance.sources.items():
                if source.card is not None:
                    self._node.send(wire.Bye(sender=self._node.name, to=source.name), address)

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """Every known rank: its stage, how long the instance has been in it, and seconds since it was heard."""
        return [
            {
                "peer": source.name or source.endpoint.address,
                "rank": source.card.inventory.rank if source.card else None,
                "instance": instance.key,
                "state": f"{instance.stage.value}{' (suspect)' if instance.suspect else ''}",
                "age": round(now - instance.since, 3),
                "heard": round(now - source.heard, 3) if source.card else None,
                "transport": source.transport,
            }
            for instance in list(self._instances.values())
            for source in list(instance.sources.values())
        ]

    def snapshot(self) -> dict[str, str]:
        """Peers and how they stand. Any thread."""
        return {
            key: f"{each.stage.value}{' (suspect)' if each.suspect else ''}"
            for key, each in list(self._instances.items())
        }

    def _of_address(self, address: str) -> list[Instance]:
        return [each for each in self._instances.values() if address in each.sources or address in each.siblings]
