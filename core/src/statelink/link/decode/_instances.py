"""Finds prefill instances, exchanges handshakes with their ranks, and notices when they are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statelink import wire
from statelink._logs import logger
from statelink.errors import ConfigError, PeerError, Reason
from statelink.link._reasons import seconds_since
from statelink.link.peers import InstanceEvent, InstanceState, can_send, check_peer, is_sibling

from ._attaching import Attaching
from ._instance import Instance
from ._look_up import LookUp, Unanswered

if TYPE_CHECKING:
    from statelink.link._context import Context
    from statelink.link.peers import Peer

    from ._instance import PrefillRank

__all__ = ["Instances"]

log = logger("statelink.link")

RETRY_REFUSED_SECONDS = 10.0
"""Seconds after which a refused instance is tried again, if failed rooms wait for its ranks to drain."""
RETRY_FOR_ROOM_SECONDS = 1.0
"""Seconds after which a new room has a refused instance tried again, because prefill may have been restarted at the
same address. Rooms that are opened earlier fail with the reason of the refusal."""
DIALS = 64
"""Most addresses that are dialled in one turn, which takes some milliseconds. Rooms and deadlines wait meanwhile."""
REDIAL = 4
"""Most `Hello` messages that may wait in the connection to a peer that does not answer."""


class Instances:
    """The prefill instances that this decode rank knows. Belongs to the control thread.

    Args:
        context: The link's parts.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._instances: dict[str, Instance] = {}
        self._at: dict[str, list[Instance]] = {}
        """The instances that have a rank or a sibling at an address."""
        self._unanswered = Unanswered(context.name, context.channel, context.rendezvous)
        self._attaching = Attaching(context, lambda instance, reason: self._refuse(instance, reason, tell=True))
        self._look_up = LookUp(context, self._greet, self._move, self._refuse)
        self._suspended = False

    def get(self, peer: Peer) -> Instance:
        """The instance that the engine calls ``peer``. A new one is looked up on a data thread."""
        key = peer if isinstance(peer, str) else ",".join(peer)
        instance = self._instances.get(key)
        if instance is None:
            instance = self._instances[key] = Instance(key, peer, self._context.now())
            self._look_up.begin(instance)
        else:
            self._retry(instance, RETRY_FOR_ROOM_SECONDS)
        return instance

    def set_siblings(self, siblings: list[str]) -> None:
        """Use these addresses of the other ranks of this link's own instance, instead of those that were known."""
        self._look_up.set_siblings(siblings)
        for instance in list(self._instances.values()):
            if instance.state is InstanceState.REFUSED:  # perhaps because these addresses were missing
                self._try_again(instance)

    def explain(self, instance: Instance) -> tuple[str, str]:
        """Why an instance is not ready, and a hint what to look at."""
        return self._unanswered.explain(instance)

    # Look-up.

    def _retry(self, instance: Instance, after: float) -> None:
        """Try an instance again that was refused ``after`` seconds ago: it may have been restarted differently."""
        if instance.state is InstanceState.REFUSED and self._context.now() - instance.since > after:
            self._try_again(instance)

    def _try_again(self, instance: Instance) -> None:
        self._hang_up(instance)
        self._step(instance, InstanceEvent.RETRIED)
        instance.reason = None
        self._look_up.begin(instance)

    def _step(self, instance: Instance, event: InstanceEvent) -> bool:
        return instance.step(event, self._context.now())

    def _greet(self, instance: Instance, endpoints: tuple[wire.Endpoint, ...], siblings: list[str]) -> None:
        """An instance was found."""
        if not self._step(instance, InstanceEvent.FOUND):
            return
        self._unlist(instance)
        instance.find(endpoints, siblings, self._context.now())
        self._list(instance)
        if not self._is_other(instance, endpoints, siblings):
            return
        self._dial(instance)

    def _is_other(self, instance: Instance, endpoints: tuple[wire.Endpoint, ...], siblings: list[str]) -> bool:
        """Whether no sibling is a rank of the instance. If one is, nobody would ever answer for the sibling."""
        both = {endpoint.address for endpoint in endpoints} & {wire.parse_endpoint(each).address for each in siblings}
        if both:
            self._refuse(
                instance,
                Reason(
                    "config.peer",
                    "a sibling of this link is the peer itself",
                    {"link": self._context.name},
                    f"{min(both)} is an address of the prefill instance",
                    "name the other ranks of decode's own instance as siblings",
                ),
            )
        return not both

    def _move(self, instance: Instance, endpoints: tuple[wire.Endpoint, ...], siblings: list[str]) -> None:
        """An instance is at other addresses by now. Rooms for which earlier processes may still write wait there."""
        if not self._step(instance, InstanceEvent.MOVED):
            return
        before, ranks = instance.addresses, tuple(instance.ranks)
        self._unlist(instance)
        left = instance.move(endpoints, siblings, self._context.now())
        self._list(instance)
        for rank in left:
            self._attaching.detach(rank)
        at = {rank.address for rank in left}
        staying = [room for room in instance.rooms if room.waits_at(at)]
        log.info("prefill instance %s is at other addresses by now", instance.called)
        if staying:
            former = self.get(ranks)
            for room in staying:
                instance.rooms.pop(room, None)
                room.move(former)
        self._hang_up_unused(before)
        self._dial(instance)
        if instance.greeted:
            self._attaching.plan(instance)

    def _dial(self, instance: Instance) -> None:
        """Dial its addresses, a few in each turn of this thread, and then greet it."""
        if instance.state is not InstanceState.GREETING:
            return  # since the turn before
        try:
            missing = self._context.channel.undialled(instance.addresses)
            for address in missing[:DIALS]:
                self._context.channel.dial(wire.parse_endpoint(address))
        except ConfigError as error:
            self._refuse(instance, error.reason)
            return
        if len(missing) > DIALS:
            self._context.after(0.0, lambda: self._dial(instance))
        else:
            self._hello(instance)

    # Handshakes with its ranks, and with the other ranks of this link's own instance.

    def _hello(self, instance: Instance) -> None:
        """Send `Hello` to every address that has not answered. The pause before the next time grows."""
        if self._suspended:
            return
        config = self._context.config
        asked = instance.ask(self._context.now(), config.heartbeat, config.liveness / 2)
        if asked > 1:
            self._look_up.again(instance)
        if asked % REDIAL == 0:
            for address in instance.unanswered:
                self._redial(address)
        hello = wire.Hello(sender=self._context.name, handshake=self._context.announcement)
        for address in instance.unanswered:
            self._context.channel.send(hello, address)

    def _redial(self, address: str) -> None:
        """Connect again, to drop the `Hello` messages that wait in a connection: each is large, and one is enough."""
        if all(each.state is InstanceState.GREETING for each in self._of_address(address)):
            self._context.channel.redial(wire.parse_endpoint(address))

    def _welcome(self, message: wire.Welcome, address: str) -> None:
        if not any(each.state is InstanceState.GREETING for each in self._of_address(address)):
            return
        ours = self._context.handshake

        # Runs on the control thread, or for a large handshake on a data thread.
        def check(handshake: wire.Handshake) -> wire.Handshake:
            if handshake.link != message.sender:
                raise PeerError(
                    "a peer sent the handshake of another link", cause=f"{handshake.link!r:.80}", code="peer.name"
                )
            check_peer(ours, handshake, sends=False)
            return handshake

        def then(handshake: wire.Handshake | None, reason: Reason | None) -> None:
            self._met(address, handshake, reason)

        self._context.reader.read(address, message.handshake, check, then)

    def _met(self, address: str, handshake: wire.Handshake | None, reason: Reason | None) -> None:
        """The handshake of the peer at an address was read: note it, or refuse the instances that have the address."""
        for instance in self._of_address(address) if not self._suspended else ():
            if instance.state is not InstanceState.GREETING:
                continue
            rank = instance.ranks.get(address)
            if handshake is not None and self._look_up.is_other(instance, handshake, sibling=rank is None):
                instance.others[address] = handshake.inventory.instance
                self._look_up.again(instance)
                continue
            if handshake is not None and rank is not None:
                reason = self._cannot_send(handshake)
            if handshake is None or reason is not None:
                assert reason is not None
                self._refuse(instance, reason)
                continue
            if rank is not None:
                rank.answer(handshake, self._context.now())
            else:
                instance.siblings[address] = handshake
            if instance.greeted:
                self._attaching.plan(instance)

    def _cannot_send(self, handshake: wire.Handshake) -> Reason | None:
        """Why a peer cannot be a prefill rank for this link; ``None`` if it can."""
        if not can_send(handshake.role):
            what, cause = "a peer is not a prefill rank", f"its role is {handshake.role!r}"
            hint = "pass receive() an instance whose role is 'prefill' or 'both'"
            return Reason("peer.role", what, {"peer": handshake.link}, cause, hint)
        if is_sibling(self._context.handshake, handshake):
            what, cause = "a peer is of this link's own instance", f"both are of {handshake.inventory.instance!r}"
            return Reason("peer.role", what, {"peer": handshake.link}, cause, "give each instance a name of its own")
        return None

    # Refusing, losing and forgetting.

    def _refuse(self, instance: Instance, reason: Reason, *, tell: bool = False) -> None:
        """The two instances cannot work together: fail the instance's rooms with the reason, on both sides.

        ``tell``: also send the reason to its ranks.
        """
        if not self._step(instance, InstanceEvent.REFUSED):
            return
        log.warning("refused prefill instance %s: %s", instance.called, reason.coded)
        instance.reason = reason
        for each in instance.parts:
            self._attaching.detach(each)
        for address, rank in instance.ranks.items():
            if tell and rank.handshake is not None:
                self._context.channel.send(wire.Refuse(sender=self._context.name, to=rank.name, reason=reason), address)
        for room in list(instance.rooms):
            room.instance_refused(reason)

    def _lose(self, instance: Instance, rank: PrefillRank, why: str) -> None:
        """A rank was lost. Rooms to which it owes bytes fail, and other rooms go on. The handshake begins again."""
        if not self._step(instance, InstanceEvent.LOST):
            return
        for room in list(instance.rooms):
            room.rank_lost(rank, why)
        self._attaching.detach(rank)
        if not instance.rooms:
            self._drop(instance)
            return
        if self._of_address(rank.address) == [instance]:
            self._context.channel.redial(rank.endpoint)
        self._unlist(instance)
        instance.renew(rank, self._look_up.siblings, self._context.now())
        self._list(instance)
        self._hello(instance)
        self._look_up.again(instance)

    def _drop(self, instance: Instance) -> None:
        """Forget an instance that no room needs. The next room that names it looks it up again."""
        self._step(instance, InstanceEvent.DROPPED)
        for each in instance.parts:
            self._attaching.detach(each)
        self._hang_up(instance)
        self._unanswered.forget(instance)
        del self._instances[instance.key]

    def _hang_up(self, instance: Instance) -> None:
        """Close the connections that no other instance uses."""
        self._unlist(instance)
        self._hang_up_unused(instance.addresses)

    def _hang_up_unused(self, addresses: list[str]) -> None:
        for address in addresses:
            if not self._of_address(address):
                self._context.channel.hang_up(address)

    def _list(self, instance: Instance) -> None:
        for address in dict.fromkeys(instance.addresses):
            self._at.setdefault(address, []).append(instance)

    def _unlist(self, instance: Instance) -> None:
        for address in dict.fromkeys(instance.addresses):
            others = [each for each in self._at.get(address, ()) if each is not instance]
            if others:
                self._at[address] = others
            else:
                self._at.pop(address, None)

    def _of_address(self, address: str) -> list[Instance]:
        return list(self._at.get(address, ()))

    # Messages.

    def speakers(self, message: wire.Message, address: str) -> list[PrefillRank]:
        """The ranks that sent a message; several if the engine names one instance in several ways.

        Notes that they are alive. Empty if the message means an earlier process at this link's address.
        """
        found: list[PrefillRank] = []
        if message.to != self._context.handshake.link:
            return found
        now = self._context.now()
        for instance in self._at.get(address, ()):
            rank = instance.ranks.get(address)
            if rank is not None and message.sender == rank.name:
                rank.hear(now)
                instance.suspect = False
                found.append(rank)
        return found

    def at(self, address: str) -> list[PrefillRank]:
        """The ranks that were dialled at an address, whichever process is there by now."""
        found = [instance.ranks.get(address) for instance in self._of_address(address)]
        return [rank for rank in found if rank is not None]

    def handle(self, message: wire.Message, address: str) -> None:
        """Handle a message that is not about a room. ``address``: where this link dialled its sender."""
        if isinstance(message, wire.Welcome):
            self._welcome(message, address)
            return
        for instance in self._of_address(address):
            rank = instance.ranks.get(address)
            if rank is None:
                continue
            # From the process that this link knows at the address, and for this process.
            ours = message.sender == rank.name and message.to == self._context.name
            if isinstance(message, wire.Unknown):
                if rank.handshake is not None and instance.state is not InstanceState.REFUSED:
                    self._lose(instance, rank, "it does not know this link: it was restarted, or gave it up")
            elif isinstance(message, wire.Refuse):
                rank.hear(self._context.now())
                self._refuse(instance, message.reason)
            elif ours and isinstance(message, wire.Attached):
                self._attaching.attached(instance, rank, message)
            elif ours and isinstance(message, wire.Bye) and rank.may_leave(message):
                if instance.state is InstanceState.REFUSED:
                    self._try_again(instance)  # perhaps it could not be connected because it was about to leave
                else:
                    self._lose(instance, rank, "it was suspended" if message.suspended else "it closed")

    def answer_sibling(self, message: wire.Hello) -> None:
        """Answer another rank of this link's own instance, which asks for the inventory."""
        context = self._context
        ours = context.handshake

        def then(_: None, reason: Reason | None) -> None:
            answer: wire.Message = wire.Welcome(sender=context.name, to=message.sender, handshake=context.announcement)
            if reason is not None:
                answer = wire.Refuse(sender=context.name, to=message.sender, reason=reason)
            context.channel.send(answer)

        context.reader.read(
            message.sender, message.handshake, lambda handshake: check_peer(ours, handshake, sends=False), then
        )

    # Time.

    def beat(self, now: float, late: float) -> None:
        """See `Role.beat`. Also repeats messages that are not answered, and drops instances that no room needs."""
        for instance in list(self._instances.values()):
            self._unanswered.look(instance, now)
            self._tell_silence(instance, now)
            if instance.state is InstanceState.REFUSED and instance.rooms:
                # Memory of these rooms is quarantined until its ranks say Drained.
                self._retry(instance, RETRY_REFUSED_SECONDS)
            elif instance.state is InstanceState.REFUSED and now - instance.since > RETRY_REFUSED_SECONDS:
                self._drop(instance)
            if instance.state in (InstanceState.RESOLVING, InstanceState.GREETING) and not instance.rooms:
                self._drop(instance)
            if instance.state in (InstanceState.RESOLVING, InstanceState.REFUSED, InstanceState.GONE):
                continue
            if instance.state is InstanceState.GREETING and now >= instance.ask_at:
                self._hello(instance)
            self._ping(instance, now, late)
            self._attaching.tell_parts(instance)
            if instance.state is InstanceState.READY and not instance.suspect:
                instance.tell_ready()

    def _tell_silence(self, instance: Instance, now: float) -> None:
        """Tell rooms that nobody answers for an instance, so that they need not wait until their deadlines."""
        if self._suspended or instance.state not in (InstanceState.RESOLVING, InstanceState.GREETING):
            return
        limit = self._unanswered.limit(instance, self._context.config.liveness)
        if now - instance.since > limit:
            for room in list(instance.rooms):
                room.instance_silent(instance, limit)

    def _ping(self, instance: Instance, now: float, late: float) -> None:
        """Ping the ranks, and lose those that are silent for too long. ``late``: see `Role.beat`."""
        liveness = self._context.config.liveness
        for rank in list(instance.ranks.values()):
            if rank.handshake is None:
                continue
            rank.count_sleep(late)
            silent = now - rank.heard
            if rank.exited or silent > liveness:
                why = "its process has ended" if rank.exited else f"it has been silent for {silent:.1f} s"
                log.warning("lost prefill rank %s: %s", rank.name, why)
                self._lose(instance, rank, why)
                return
            instance.suspect = instance.suspect or silent > liveness / 2
            self._context.channel.send(wire.Ping(sender=self._context.name, to=rank.name), rank.address)

    def suspend(self) -> None:
        """Say goodbye to all ranks, forget them, and greet nobody."""
        self._say_goodbye(suspended=True)
        self._suspended = True
        for instance in list(self._instances.values()):
            for rank in list(instance.ranks.values()):
                self._lose(instance, rank, "this link was suspended")

    def resume(self) -> None:
        """Greet those for which rooms wait."""
        self._suspended = False
        for instance in self._instances.values():
            if instance.state is InstanceState.GREETING:
                instance.since = self._context.now()  # nobody was asked meanwhile
                self._hello(instance)

    def close(self) -> None:
        """Say goodbye."""
        self._say_goodbye(suspended=False)

    def _say_goodbye(self, *, suspended: bool) -> None:
        us, registration = self._context.name, self._context.handshake.registration
        for instance in self._instances.values():
            for address, rank in instance.ranks.items():
                if rank.handshake is not None:
                    bye = wire.Bye(sender=us, to=rank.name, registration=registration, suspended=suspended)
                    self._context.channel.send(bye, address)

    # What is seen from outside. Any thread.

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """Every known rank: its state, how long the instance has been in it, and seconds since it was heard.

        It may have been heard after ``now``, which is the snapshot's.
        """
        return [
            {
                "peer": rank.name or rank.endpoint.address,
                "role": "prefill",
                "rank": rank.rank,
                "instance": rank.handshake.inventory.instance if rank.handshake else instance.key,
                "state": instance.words,
                "age": seconds_since(instance.since, now),
                "heard": seconds_since(rank.heard, now) if rank.handshake else None,
                "transport": rank.transport,
            }
            for instance in list(self._instances.values())
            for rank in list(instance.ranks.values())
        ]

    def snapshot(self) -> dict[str, tuple[str, list[str]]]:
        """See `Role.snapshot`."""
        return {
            key: (each.words, [rank.name for rank in list(each.ranks.values())])
            for key, each in list(self._instances.items())
        }
