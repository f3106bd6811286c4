"""Which of decode's requests belongs to which room of prefill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from statelink import wire
from statelink.errors import Reason

from ._early import Early, key_of
from ._past import REMEMBERED, Past, Who
from ._sending import Sending
from ._status import ENDED
from ._use import Use

if TYPE_CHECKING:
    from ._destinations import Destination, Destinations
    from ._early import Asked
    from ._forgotten import RoomKey
    from ._node import Node
    from ._past import Gone

__all__ = ["Asking", "Group"]


class Stale(NamedTuple):
    """A request that may be of another use of the id than the room.

    Attributes:
        ours: Whether it may be of an earlier room of this side; otherwise the room may be of an earlier use of decode.
        met: The use of decode that is settled then.
    """

    ours: bool
    met: int


HINT = "give each use of an id an attempt of its own, the same on both sides"


class Group(NamedTuple):
    """Ranks of one decode instance that have spoken of a room.

    Attributes:
        asked: Those that asked for it, with what they asked.
        gone: What the others said, which gave it up; ``None`` if all asked.
    """

    asked: list[tuple[Destination, Asked]]
    gone: Gone | None


class Asking:
    """Keeps requests until a room is theirs, and answers those that no room can be for.

    A room belongs to the instance that its engine named, or else to the first of which every rank has asked for it.
    What others say of it changes nothing of it. Belongs to the control thread.

    Args:
        node: The link's control thread.
        destinations: The decode ranks that are known.
        send: Sends a message to one of them.
        bound: Called with a room and the ranks of the instance that it belongs to from here on.
        fail: Ends a room: with the reason, the ranks that know (with their instances), and how many there are.
    """

    def __init__(
        self,
        node: Node,
        destinations: Destinations,
        send: Callable[[wire.Message], None],
        bound: Callable[[Sending, list[tuple[Destination, wire.Request]]], None],
        fail: Callable[[Sending, Reason, Mapping[str, str], int], None],
    ) -> None:
        self._node = node
        self._destinations = destinations
        self._send = send
        self._bound = bound
        self._fail = fail
        self.early = Early(REMEMBERED, node.config.max_early_bytes)
        self.past = Past(node.now, node.config.deadline)

    # What decode says.

    def request(self, message: wire.Request, peer: Destination) -> None:
        """A rank asks for a room."""
        use = (peer.name, message.room, message.generation)
        if not self.past.admit(use):
            return  # it came twice, or after its end: what was said of it stands
        if peer.plan is None:
            reason = Reason("room.unattached", "a request came before its sender was attached", {"peer": peer.name})
            self.answer(peer, message, reason)
            return
        self._reconcile(message, peer)
        room = self._room(message.room, message.attempt)
        if room is not None and peer.name in room._deliveries:
            # It asks anew, so the use that this room belongs to has ended there.
            cause = f"{peer.name} asks for it anew, before it is over here"
            self._fail(room, room._reason_for("room.reused", "a room id is used again", cause, HINT), {}, 0)
        elif room is not None and room.status not in ENDED:
            reason_not = self._not_for(room, peer)
            if reason_not is None:
                self._keep(message, peer)
                self.bind(room)
            else:
                self.answer(peer, message, reason_not)
            return
        elif self._settled(message, peer):
            return
        elif room is not None and room._deliveries:
            what = "the room has ended on prefill"
            self.answer(peer, message, room.reason or room._reason_for("room.ended", what))
            return
        self._keep(message, peer)

    def gave_up(self, message: wire.Failed, peer: Destination) -> None:
        """A rank gave up a use for which no room was found: before prefill opened one, or before it asked."""
        key = (message.room, message.attempt)
        use = (peer.name, message.room, message.generation)
        request = self.early.get(key, peer.name)
        # Said again, or late, it is nothing to the next use of the id.
        fresh = self.past.admit(use) if request is None else request.generation == message.generation
        if not fresh or peer.plan is None:
            return
        self.early.drop(key, peer.name)
        who = self._who(peer)
        end = self.past.due(key, who, 0.0)
        if end is not None:  # this side gave it up as well
            self.past.settle(key, who, end)
            self.past.meet(use)
            return
        room = self._room(message.room, message.attempt)
        waits = room is not None and room.status not in ENDED and self._not_for(room, peer) is None
        if waits and room is not None and room._to is not None:
            self.past.meet(use)
            self._fail(room, message.reason, {peer.name: who.instance}, peer.expected)
            return
        gone = self.past.give_up(key, who, message.generation, message.reason)
        if waits and room is not None:
            self.bind(room)
            return
        for another, asked in self._asked(key, None):  # nobody of its instance waits for what will not come
            other = self._who(another)
            if other.instance == who.instance and other.key == who.key:  # with another key, it may only say so
                self.early.drop(key, another.name)
                self.past.join(gone, other, asked.request.generation)
                self.answer(another, asked.request, message.reason)

    def _reconcile(self, message: wire.Request, peer: Destination) -> None:
        """Uses that ended on both sides without meeting each other: they were one and the same."""
        key, who = key_of(message), self._who(peer)
        for earlier in message.unmet:
            use = (peer.name, message.room, earlier.generation)
            if not earlier.generation:
                continue
            if not self.past.met(use):
                end = self.past.due(key, who, message.lifetime_ms / 1000 + earlier.ended_ms_ago / 1000)
                if end is None or end.many:
                    continue
                self.past.settle(key, who, end)
                self.past.meet(use)
            known = Use(sender=self._node.name, to=peer.name, room=message.room, generation=earlier.generation)
            if use not in self.past.restless:
                self._send(wire.Drained(**known, met=earlier.generation))

    def _settled(self, message: wire.Request, peer: Destination) -> bool:
        """Whether a request is for a room that has ended on either side; it is answered then."""
        key, who = key_of(message), self._who(peer)
        end = self.past.due(key, who, message.lifetime_ms / 1000)
        if end is not None:
            self.past.settle(key, who, end)
            self.answer(peer, message, end.reason, met=message.generation)
            return True
        gone = self.past.gone(key, (who.instance,))
        # Whoever has another key may only say that it is of the instance: then the room decides, once it is open.
        alike = gone is not None and who.key in {gone.keys[name] for name in gone.uses}
        if gone is not None and alike and who.name not in gone.uses and len(gone.uses) < gone.ranks:
            self.past.join(gone, who, message.generation)
            self.answer(peer, message, gone.reason)
            return True
        return False

    # Rooms.

    def open(self, room: Sending) -> None:
        """The engine opened a room; also called when decode speaks of one whose opening is still to be dealt with."""
        if room._begun or room.status in ENDED:
            return
        room._begun = True
        key = room._key
        to = room._to
        gone = self.past.gone(key, to.names | to.keys) if to is not None else None
        if gone is not None:
            told = self._belonged(room, gone)
            self._fail(room, gone.reason, told, gone.ranks)
            return
        for peer, asked in self._asked(key, None):
            reason = self._not_for(room, peer)
            if reason is not None:
                self.early.drop(key, peer.name)
                self.answer(peer, asked.request, reason)
        self.bind(room)

    def bind(self, room: Sending) -> None:
        """Give a room to the instance that has spoken of it with every rank, if there is one by now."""
        if room.status in ENDED or room._deliveries:
            return
        group = self._complete(room)
        if group is None:
            return
        if self._reused(room, group):
            return
        if group.gone is not None:
            told = self._belonged(room, group.gone)
            self._fail(room, group.gone.reason, told, group.gone.ranks)
            return
        self._bound(room, [(peer, asked.request) for peer, asked in group.asked])

    def bound(self, room: Sending) -> None:
        """A room was given to its destinations: their requests are no longer kept, and nobody else waits for it."""
        for name, delivery in room._deliveries.items():
            self.early.drop(room._key, name)
            self.past.meet((name, room.room, delivery.request.generation))
        for peer, asked in self._asked(room._key, None):
            self.early.drop(room._key, peer.name)
            self.answer(peer, asked.request, self._not_for(room, peer) or self._taken(room))

    def ended(self, room: Sending, reason: Reason, told: Mapping[str, str], ranks: int) -> None:
        """A room ended before it belonged to anybody: answer who asked for it, and remember it for who has yet to.

        Args:
            room: The room.
            reason: Why.
            told: Ranks that know, with their instances.
            ranks: How many there are.
        """
        told = dict(told)
        for peer, asked in self._asked(room._key, room):
            if peer.name not in told:
                stale = self._stale(room, peer, asked)
                self._turn_away(room, peer, asked, reason, stale, told)
                ranks = max(ranks, peer.expected)
        counted = [sum(each == instance for each in told.values()) for instance in set(told.values())]
        if not told or max(counted) < ranks:
            self.past.ended(room._key, reason, room._to, told)

    def missing(self, room: Sending) -> int | None:
        """How many ranks have yet to ask, of the instance of which most have; ``None`` if nobody has. Any thread."""
        lacking: dict[str, int] = {}
        for name in list(self.early.of(room._key)):
            peer = self._destinations.get(name)
            if peer is not None and self._not_for(room, peer) is None:
                instance = peer.card.inventory.instance
                lacking[instance] = lacking.get(instance, peer.expected) - 1
        return min(lacking.values(), default=None)

    def unasked(self, room: Sending) -> str:
        """Why nobody has the room, for the reason of its deadline."""
        waiting = self._asked(room._key, room)
        if waiting:
            names = ", ".join(peer.name for peer, _ in waiting[:4])
            return f"{len(waiting)} decode ranks have asked for it ({names}), which are not all of their instance"
        others = [each for each in self.early.attempts(room.room) if each != room.attempt]
        if others:
            return f"decode asked for attempt {others[0]} of it, and this is attempt {room.attempt}"
        instances = {peer.card.inventory.instance for peer in self._destinations.known}
        left = [gone for gone in (self.past.gone(room._key, (name,)) for name in sorted(instances)) if gone is not None]
        if left and room._to is None:
            said = f"decode instance {left[0].instance!r} gave it up before it asked ({left[0].reason.what})"
            return f"{said}, and this room does not say that it is for that one"
        return "decode never asked for it"

    def answer(self, peer: Destination, request: wire.Request, reason: Reason, *, met: int = 0) -> None:
        """A request that will not be served: say why, and that nothing is in flight.

        Args:
            peer: Who asked.
            request: What.
            reason: Why not.
            met: The use of that rank to which a room of this side belonged, if any did.
        """
        if met:
            self.past.meet((peer.name, request.room, met))
        use = Use(sender=self._node.name, to=peer.name, room=request.room, generation=request.generation)
        self._send(wire.Failed(**use, reason=reason, met=met))
        self._send(wire.Drained(**use, met=met))

    # Whose a room is.

    def _complete(self, room: Sending) -> Group | None:
        """The first instance of which every rank has spoken, and at least one has asked."""
        key = room._key
        groups: list[dict[int, tuple[Destination, Asked]]] = []
        for peer, asked in self._asked(key, room):
            ours = peer.card.inventory
            for group in groups:
                one = next(iter(group.values()))[0]
                if one.card.inventory.instance == ours.instance and ours.rank not in group:
                    break
            else:  # the first of its instance; or another that says to be the same rank, which takes nobody's place
                group = {}
                groups.append(group)
            group[ours.rank] = peer, asked
            gone = self.past.gone(key, (ours.instance,))
            left = 0 if gone is None else len(gone.of(room._to).keys() - {each.name for each, _ in group.values()})
            if len(group) + left >= max(each.expected for each, _ in group.values()):
                return Group(list(group.values()), gone if left and len(group) < peer.expected else None)
        return None

    def _reused(self, room: Sending, group: Group) -> bool:
        """Whether a rank of a group may mean another use of the id; the room and its requests fail then."""
        found = [(peer, asked, self._stale(room, peer, asked)) for peer, asked in group.asked]
        stale = [(peer, asked, each) for peer, asked, each in found if each is not None]
        if not stale:
            return False
        names = ", ".join(peer.name for peer, _, _ in stale)
        cause = f"an earlier use ended on one side without the other, so that {names} may mean another use than this"
        reason = room._explained(room._reason_for("room.reused", "a room id is used again", cause, HINT))
        told: dict[str, str] = {}
        for peer, asked, each in stale:
            self._turn_away(room, peer, asked, reason, each, told)
        self._fail(room, reason, told, max(peer.expected for peer, _ in group.asked))
        return True

    def _stale(self, room: Sending, peer: Destination, asked: Asked) -> Stale | None:
        """Which use a request or a room may be of, other than each other; that one is settled by the answer."""
        who = self._who(peer)
        lasts = asked.request.lifetime_ms / 1000 + self._node.now() - asked.at
        end = self.past.due(room._key, who, lasts)
        if end is not None:
            self.past.settle(room._key, who, end)
        if end is not None or self.past.forgot(room._key):
            return Stale(ours=True, met=asked.request.generation)
        unmet = self._unmet(room, peer, asked)
        return None if unmet is None else Stale(ours=False, met=unmet)

    def _turn_away(
        self,
        room: Sending,
        peer: Destination,
        asked: Asked,
        reason: Reason,
        stale: Stale | None,
        told: dict[str, str],
    ) -> None:
        """Answer a request for a room that ends, and add to ``told`` who knows of the end of its own side of it."""
        instance = peer.card.inventory.instance
        gone = self.past.gone(room._key, (instance,))
        self.early.drop(room._key, peer.name)
        self.answer(peer, asked.request, reason, met=stale.met if stale is not None else asked.request.generation)
        if stale is not None and stale.ours:
            return
        told[peer.name] = instance
        if gone is not None and stale is not None and gone.uses.get(peer.name) == stale.met:
            told.update(self._belonged(room, gone))

    def _belonged(self, room: Sending, gone: Gone) -> dict[str, str]:
        """A room belonged to what an instance gave up: who of it knows."""
        self.past.settle_gone(room._key, gone)
        uses = gone.of(room._to)
        for name, generation in uses.items():
            use = (name, room.room, generation)
            self.past.meet(use)
            if self._destinations.get(name) is not None and use not in self.past.restless:
                said = Use(sender=self._node.name, to=name, room=room.room, generation=generation)
                self._send(wire.Drained(**said, met=generation))
        return dict.fromkeys(uses, gone.instance)

    def _unmet(self, room: Sending, peer: Destination, asked: Asked) -> int | None:
        """The earliest use that ended on a rank, and that this room may belong to, if there is one."""
        for earlier in asked.request.unmet:
            ended = asked.at - earlier.ended_ms_ago / 1000
            met = earlier.generation and self.past.met((peer.name, room.room, earlier.generation))
            if not met and room._opened < ended + self.past.lifetime:
                return earlier.generation
        return None

    def _not_for(self, room: Sending, peer: Destination) -> Reason | None:
        """Why a rank cannot have a room; ``None`` if it can."""
        if room._deliveries:
            return self._taken(room)
        who = self._who(peer)
        if room._to is None or room._to.admits(who.instance, who.key):
            return None
        cause = f"it is for {room._to}, and {peer.name} is of {who.instance}"
        return room._reason_for("room.instances", "a room is for another decode instance", cause)

    def _taken(self, room: Sending) -> Reason:
        first = next(iter(room._deliveries.values())).destination
        cause = f"it belongs to {first.card.inventory.instance}, of which every rank had asked for it before"
        return room._reason_for("room.instances", "two decode instances ask for one room", cause)

    # Small helpers.

    def _keep(self, message: wire.Request, peer: Destination) -> None:
        for name, request in self.early.put(peer.name, message, self._node.now()):
            reason = Reason("room.early", "too many requests wait for prefill", {"room": str(request.room)})
            dropped = self._destinations.get(name)
            if dropped is not None:
                self.answer(dropped, request, reason)

    def _asked(self, key: RoomKey, room: Sending | None) -> list[tuple[Destination, Asked]]:
        """Who asked for a room; with a room, only those that can have it."""
        known = ((self._destinations.get(name), asked) for name, asked in list(self.early.of(key).items()))
        return [
            (peer, asked)
            for peer, asked in known
            if peer is not None and (room is None or self._not_for(room, peer) is None)
        ]

    def _room(self, number: int, attempt: int) -> Sending | None:
        room = self._node.rooms.get(number)
        if not isinstance(room, Sending) or room.attempt != attempt:
            return None
        self.open(room)
        return room

    def _who(self, peer: Destination) -> Who:
        return Who(peer.name, peer.card.inventory.instance, self._node.channel.key_of(peer.name), peer.expected)
