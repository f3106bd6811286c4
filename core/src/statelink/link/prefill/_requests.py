"""Which of decode's requests belongs to which room of prefill."""

from __future__ import annotations

from collections.abc import Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from statelink import wire
from statelink.backend import Side
from statelink.errors import Reason
from statelink.link._room_state import room_reason
from statelink.link._status import ENDED, Status
from statelink.link.peers import RankState

from ._claims import Claims
from ._pending import PendingRequests
from ._tombstones import GivenUp, Tombstones

if TYPE_CHECKING:
    from statelink.link._context import Context
    from statelink.link._reasons import PeerInfo
    from statelink.link._room_table import Rooms

    from ._claims import Group, Stale
    from ._decode_ranks import DecodeRank, DecodeRanks
    from ._in_flight import RequestId, UsesInFlight
    from ._pending import Asked
    from ._sending_state import SendingState

__all__ = ["Requests", "Wanted"]


MOST_PENDING = 65536
"""Most requests that wait for their rooms."""
REUSED = "a room id is used again"
DOUBT_SECONDS = 1.0
"""Seconds that decode's request waits for a room, if the last room that prefill opened may have been meant for it."""
HINT = "take another id for each request, the same on both sides"


class Wanted(NamedTuple):
    """A room that decode asks for, and that prefill's engine has not opened.

    Attributes:
        room: Its id.
        tokens: N: positions of the request; ``None`` if decode leaves them to prefill.
        prefix: P: positions that decode holds already.
        content: What the request is, as decode states it; empty if it states nothing.
    """

    room: int
    tokens: int | None
    prefix: int
    content: bytes


class Requests:
    """Keeps decode's requests until they meet a room, and refuses those that can meet none.

    A room belongs to the first instance of which every rank has asked for it. Messages of other instances do not
    change it. Belongs to the control thread.

    Args:
        context: The link's parts.
        ranks: The decode ranks that are known.
        rooms: The rooms that send.
        uses_in_flight: Uses for which writes may be in flight after their room is over.
    """

    def __init__(
        self, context: Context, ranks: DecodeRanks, rooms: Rooms[SendingState], uses_in_flight: UsesInFlight
    ) -> None:
        self._context = context
        self._ranks = ranks
        self._rooms = rooms
        self._uses_in_flight = uses_in_flight
        self._pending = PendingRequests(MOST_PENDING, context.config.max_pending_request_bytes)
        self._early = PendingRequests(MOST_PENDING, context.config.max_pending_request_bytes)
        """Requests of ranks to which the backend still connects. Nothing was looked at of them."""
        self._tombstones = Tombstones(context.now, context.config.deadline)
        self._claims = Claims(context.now, context.channel, ranks, self._pending, self._tombstones)
        self.wanted: SimpleQueue[Wanted] = SimpleQueue()
        """Rooms that decode asks for, for an engine that opens those. A thread of the engine takes them."""
        self.wants = False
        """Whether the engine does."""

    # What decode says.

    def request(self, message: wire.Request, rank: DecodeRank) -> None:
        """Handle a rank's request."""
        if rank.plan is None and rank.state is RankState.ATTACHING:
            self._put(self._early, message, rank)
            return
        if not self._tombstones.admit((rank.name, message.room, message.generation)):
            return  # the request is a duplicate, or came after the rank's Failed for this use: it was answered before
        if rank.plan is None:
            reason = Reason("room.unattached", "a request came before its sender was attached", {"peer": rank.name})
            self.answer(rank, message, reason)
            return
        if message.unmet:
            self._reconcile(message, rank)
        room = self._room(message.room)
        if room is not None and room.status is Status.BOOTSTRAPPING:
            self._meet(room, message, rank)
            return
        if room is not None and room.delivery_to(rank.name) is not None:
            # The rank asks again, so the use to which this room belongs has ended on that rank.
            cause = f"{rank.name} asks for it anew, before it is over here"
            room.fail_known(room.reason_for("room.reused", REUSED, cause, HINT), {}, 0)
        elif room is not None and room.status not in ENDED:
            self.answer(rank, message, self._claims.taken(room))
            return
        elif self._answered_by_tombstone(message, rank):
            return
        elif room is not None and room.bound:
            what = "the room has ended on prefill"
            self.answer(rank, message, room.reason or room.reason_for("room.ended", what))
            return
        if self.wants and room is None and not self._pending.asked_for(message.room):
            self._want(message)
        self._keep(message, rank)
        if self._tombstones.any_given_up():
            self._doubt(message, rank)

    def settled(self, rank: DecodeRank) -> None:
        """A rank is attached, or was refused: handle its requests that came while the backend connected to it."""
        for message in self._early.take(rank.name):
            self.request(message, rank)

    def want(self) -> None:
        """Rooms that decode asks for wait in `wanted` from now on, with those for which it has asked."""
        if not self.wants:
            self.wants = True
            for message in self._pending.first():
                if self._rooms.get(message.room) is None:
                    self._want(message)

    def _want(self, message: wire.Request) -> None:
        if self.wanted.qsize() < MOST_PENDING:  # more than that cannot wait for their rooms, either
            tokens = None if message.least else message.tokens
            self.wanted.put(Wanted(message.room, tokens, message.prefix, message.content))

    def _meet(self, room: SendingState, message: wire.Request, rank: DecodeRank) -> None:
        """A rank asks for an open room that belongs to no instance yet."""
        if not self._claims.sole(message, rank):
            self._keep(message, rank)
            self.bind(room)
        elif (failed := room.bind([(rank, message)])) is not None:
            self._keep(message, rank)  # the end of the room answers it
            self._not_bound(room, *failed)
        else:
            self._tombstones.meet((rank.name, message.room, message.generation))
            room.serve()

    def gave_up(self, message: wire.Failed, rank: DecodeRank) -> None:
        """Handle a rank's Failed for a use to which no room of this side belongs yet."""
        number = message.room
        use = (rank.name, number, message.generation)
        early = self._early.get(number, rank.name)
        if early is not None and early.generation == message.generation:
            self._early.drop(number, rank.name)
        request = self._pending.get(number, rank.name)
        # A repeated or late Failed must not affect a later use of this room id.
        fresh = self._tombstones.admit(use) if request is None else request.generation == message.generation
        if not fresh:
            return
        self._pending.drop(number, rank.name)
        asking = self._claims.asking(rank)
        end = self._tombstones.due(number, asking, 0.0)
        if end is not None:  # the room of this use ended on this side as well
            self._tombstones.acknowledge(number, asking, end)
            self._tombstones.meet(use)
            return
        room = self._room(number)
        waits = room is not None and room.status not in ENDED and not room.bound
        if room is not None and waits:
            # Another rank may have asked to keep the room: it will ask for it, or decline it, too.
            room.keepers -= {rank.name}
        if room is not None and waits and not room.keepers:
            self._tombstones.meet(use)
            informed = {rank.name: asking.instance}
            earlier = self._tombstones.given_up(number, asking.instance)
            if earlier is not None:  # other ranks of the instance, which declined it before
                informed |= self._belonged(room, earlier)
            # If the room was opened after the use had ended on decode, it may have been meant for decode's next use.
            if room.opened > self._context.now() - message.ended_ms_ago / 1000:
                given_up = GivenUp(message.reason, asking.instance)
                given_up.join(asking, message.generation)
                self._tombstones.spend(number, given_up)
            room.fail_known(message.reason, informed, rank.expected)
            return
        given_up = self._tombstones.give_up(number, asking, message.generation, message.reason, kept=waits)
        if room is not None and waits:
            self.bind(room)
            return
        # The instance will not use the room: refuse the requests of its other ranks. A rank with another key may only
        # claim to be of this instance, so its request stays.
        for another, asked in self._claims.asked(number):
            other = self._claims.asking(another)
            if other.instance == asking.instance and other.key == asking.key:
                self._pending.drop(number, another.name)
                given_up.join(other, asked.request.generation)
                self.answer(another, asked.request, message.reason)

    def keep(self, message: wire.Keep, rank: DecodeRank) -> None:
        """Handle a rank's Keep. One that comes before the room is opened does nothing: decode repeats it."""
        room = self._room(message.room)
        if room is not None and rank.plan is not None and not room.bound:
            room.kept_by(rank, message.lease_ms / 1000)

    def declines(self, message: wire.Request) -> bool:
        """Whether a request of an unknown rank is new. It is refused then, and counts as answered from now on."""
        return self._tombstones.admit((message.sender, message.room, message.generation))

    def lost(self, rank: DecodeRank) -> None:
        """A rank was lost: drop its requests."""
        self._pending.take(rank.name)
        self._early.take(rank.name)

    def drained(self, message: wire.Failed, rank: DecodeRank) -> wire.Drained | None:
        """The answer to a rank that gave a use up; ``None`` while writes for the use may be in flight."""
        use = (rank.name, message.room, message.generation)
        return None if self._may_land(use) else self._drained(use)

    def _may_land(self, use: RequestId) -> bool:
        """Whether writes for a use may be in flight, or may be started. Its room may be forgotten already."""
        found = ((room, room.delivery_to(use[0])) for room in self._rooms.with_id(use[1]))
        return use in self._uses_in_flight or any(
            each is not None and each.use == use and (room.status not in ENDED or each.in_flight.on(Side.TARGET))
            for room, each in found
        )

    def _drained(self, use: RequestId) -> wire.Drained:
        name, room, generation = use
        met = generation if self._tombstones.met(use) else 0
        return wire.Drained(sender=self._context.name, to=name, room=room, generation=generation, met=met)

    def load(self) -> dict[str, int]:
        """Numbers of the things that are kept for rooms that are not open here. Any thread."""
        return {
            "pending_requests": len(self._pending) + len(self._early),
            "pending_request_bytes": self._pending.nbytes + self._early.nbytes,
            **self._tombstones.load(),
        }

    def _reconcile(self, message: wire.Request, rank: DecodeRank) -> None:
        """Match uses that ended on the rank with rooms that ended here. Each pair was one use.

        The rank lists such a use in its request if it does not know whether prefill had a room for it.
        """
        asking, lifetime = self._claims.asking(rank), message.lifetime_ms / 1000
        for earlier in message.unmet:
            use = (rank.name, message.room, earlier.generation)
            if not earlier.generation:
                continue
            if not self._tombstones.met(use):
                end = self._tombstones.due(message.room, asking, lifetime + earlier.ended_ms_ago / 1000)
                if end is None or end.many:
                    continue
                self._tombstones.acknowledge(message.room, asking, end)
                self._tombstones.meet(use)
            if not self._may_land(use):
                self._ranks.send(self._drained(use))

    def _answered_by_tombstone(self, message: wire.Request, rank: DecodeRank) -> bool:
        """Answer a request for a room that has ended on either side. Returns whether it was one."""
        asking = self._claims.asking(rank)
        end = self._tombstones.due(message.room, asking, message.lifetime_ms / 1000)
        if end is not None:
            self._tombstones.acknowledge(message.room, asking, end)
            self.answer(rank, message, end.reason, met=message.generation)
            return True
        given_up = self._tombstones.given_up(message.room, asking.instance)
        # A rank with another key may only claim to be of this instance. Its request stays, until the room is open.
        same_key = given_up is not None and given_up.has_key(asking.key)
        if (
            given_up is not None
            and same_key
            and asking.name not in given_up.uses
            and len(given_up.uses) < given_up.ranks
        ):
            given_up.join(asking, message.generation)
            self.answer(rank, message, given_up.reason)
            return True
        return False

    def _doubt(self, message: wire.Request, rank: DecodeRank) -> None:
        """A request is pending. Refuse it soon, if the room that it means may have ended with an earlier use.

        Decode had given that use up when prefill opened its last room, which ended with that. If the room was meant for
        that use, prefill opens another one for this request. If it was meant for this request, nobody opens another
        one, and decode would wait until its deadline.
        """
        spent = self._spent(message, rank)
        if spent is not None:
            self._context.after(DOUBT_SECONDS, lambda: self._refuse_doubtful(message, rank, spent))

    def _spent(self, message: wire.Request, rank: DecodeRank) -> GivenUp | None:
        """What ended the room that a request may mean."""
        return self._tombstones.spent(message.room, self._claims.asking(rank), message.lifetime_ms / 1000)

    def _refuse_doubtful(self, message: wire.Request, rank: DecodeRank, spent: GivenUp) -> None:
        """Refuse a request for which nobody has opened another room, and those of the other ranks of its instance."""
        number = message.room
        if self._pending.get(number, rank.name) is not message or self._spent(message, rank) is not spent:
            return
        cause = (
            f"{spent.instance} had given an earlier use up ({spent.reason.clause}) when prefill opened its room, which "
            "ended with that; nobody can tell which use the room was meant for"
        )
        for each, asked in self._claims.asked(number):
            if self._spent(asked.request, each) is spent:
                self._pending.drop(number, each.name)
                reason = room_reason(self._context, number, "room.reused", REUSED, cause, HINT, peer=each.name)
                self.answer(each, asked.request, reason)
                # A room that prefill opens for this use later fails with the same reason.
                asking, use = self._claims.asking(each), asked.request.generation
                self._tombstones.give_up(number, asking, use, reason, kept=False)

    # Rooms.

    def wait_for(self, room: SendingState) -> bool:
        """Whether decode has asked for a room's id, or given the room up, so that `open` has something to do.

        Any thread. Call it after the job that opens the room was posted. Then no message of decode is missed. This
        method sees those that came before the call. The job runs after those that come later, because the control
        thread runs posted jobs before it waits.
        """
        if self._pending.asked_for(room.room):
            return True
        return self._tombstones.may_be_given_up(room.room)

    def open(self, room: SendingState) -> None:
        """The engine opened a room. Also called when a message about it comes before the posted job that opens it."""
        if not room.begin() or not self.wait_for(room):
            return
        given_up = self._tombstones.ending(room.room)
        if given_up is not None:
            self._end_with(room, given_up)
            return
        self._tombstones.reopened(room.room)
        self.bind(room)

    def _end_with(self, room: SendingState, given_up: GivenUp) -> None:
        """Fail a room with a use that an instance gave up. The instance may have asked anew: that request waits on."""
        informed = self._belonged(room, given_up)
        room.fail_known(given_up.reason, informed, given_up.ranks)
        for rank, asked in self._claims.asked(room.room):
            self._doubt(asked.request, rank)

    def bind(self, room: SendingState) -> None:
        """Bind a room to the instance of which every rank has asked for it, if there is one.

        If some of its ranks gave the room up, or may mean another use of the id, the room fails.
        """
        if room.status in ENDED or room.bound:
            return
        group = self._claims.complete(room)
        if group is None:
            return
        if self._reused(room, group):
            return
        if group.given_up is not None:
            self._end_with(room, group.given_up)
            return
        failed = room.bind([(rank, asked.request) for rank, asked in group.asked])
        if failed is not None:
            self._not_bound(room, *failed)
            return
        self._bound(room)
        room.serve()

    def _not_bound(self, room: SendingState, reason: Reason, about: PeerInfo) -> None:
        """A request does not fit the room: fail the room, which answers the requests that are pending."""
        room.fail(room.explain(reason, [about]))

    def _bound(self, room: SendingState) -> None:
        """A room belongs to an instance: drop the requests of its ranks, and refuse those of other instances."""
        for delivery in room.deliveries:
            self._pending.drop(room.room, delivery.rank.name)
            self._tombstones.meet(delivery.use)
        if not self._pending.asked_for(room.room):
            return
        for rank, asked in self._claims.asked(room.room):
            self._pending.drop(room.room, rank.name)
            self.answer(rank, asked.request, self._claims.taken(room))

    def ended(self, room: SendingState, reason: Reason, informed: Mapping[str, str], ranks: int) -> None:
        """A room ended before it belonged to an instance: answer its requests, and keep a tombstone for later ones.

        Args:
            room: The room.
            reason: Why it ended.
            informed: Link names of the ranks that know, with their instances.
            ranks: How many ranks of their instance have to know.
        """
        informed = dict(informed)
        for rank, asked in self._claims.asked(room.room):
            if rank.name not in informed:
                stale = self._claims.stale(room, rank, asked)
                self._turn_away(room, rank, asked, reason, stale, informed)
                ranks = max(ranks, rank.expected)
        counted = [sum(each == instance for each in informed.values()) for instance in set(informed.values())]
        if not informed or max(counted) < ranks:
            self._tombstones.ended(room.room, reason, informed)

    def missing(self, room: SendingState) -> int | None:
        """See `Claims.missing`. Any thread."""
        return self._claims.missing(room)

    def refusal(self, room: SendingState) -> str:
        """See `Claims.refusal`. Any thread."""
        return self._claims.refusal(room)

    def connecting(self, room: SendingState) -> str:
        """The ranks that asked for a room while the backend connects to them, as a text. Any thread."""
        return ", ".join(list(self._early.of(room.room)))

    def unasked(self, room: SendingState) -> str:
        """See `Claims.unasked`."""
        connecting = self.connecting(room)
        return f"the backend still connects to {connecting}" if connecting else self._claims.unasked(room)

    def answer(self, rank: DecodeRank, request: wire.Request, reason: Reason, *, met: int = 0) -> None:
        """Refuse a request: send Failed with the reason, and Drained, since nothing is in flight.

        Args:
            rank: The rank that asked.
            request: Its request.
            reason: Why it is refused.
            met: The generation of the rank to which a room of this side belonged; 0 if none did.
        """
        if met:
            self._tombstones.meet((rank.name, request.room, met))
        use = wire.RoomHeader(sender=self._context.name, to=rank.name, room=request.room, generation=request.generation)
        self._ranks.send(wire.Failed(**use, reason=reason, met=met))
        self._ranks.send(wire.Drained(**use, met=met))

    # Rooms and requests that may be of another use of an id.

    def _reused(self, room: SendingState, group: Group) -> bool:
        """Fail a room and its requests, if a rank of a group may mean another use of the id. Returns whether it did."""
        stale = []
        for rank, asked in group.asked:
            found = self._claims.stale(room, rank, asked)
            if found is not None:
                stale.append((rank, asked, found))
        if not stale:
            return False
        names = ", ".join(rank.name for rank, _, _ in stale)
        cause = f"an earlier use ended on one side without the other, so that {names} may mean another use than this"
        reason = room.explain(room.reason_for("room.reused", REUSED, cause, HINT))
        informed: dict[str, str] = {}
        for rank, asked, each in stale:
            self._turn_away(room, rank, asked, reason, each, informed)
        room.fail_known(reason, informed, max(rank.expected for rank, _ in group.asked))
        return True

    def _turn_away(
        self,
        room: SendingState,
        rank: DecodeRank,
        asked: Asked,
        reason: Reason,
        stale: Stale | None,
        informed: dict[str, str],
    ) -> None:
        """Refuse a request for a room that ends. Adds to ``informed`` the ranks that know of its end afterwards."""
        instance = rank.handshake.inventory.instance
        given_up = self._tombstones.given_up(room.room, instance)
        self._pending.drop(room.room, rank.name)
        self.answer(rank, asked.request, reason, met=stale.met if stale is not None else asked.request.generation)
        if stale is not None and stale.ours:
            return
        informed[rank.name] = instance
        if given_up is not None and stale is not None and given_up.uses.get(rank.name) == stale.met:
            informed.update(self._belonged(room, given_up))

    def _belonged(self, room: SendingState, given_up: GivenUp) -> dict[str, str]:
        """A room belonged to a use that an instance gave up. Returns the ranks that know, with their instance."""
        if given_up.kept:  # the room was there before
            self._tombstones.forget_given_up(room.room, given_up)
        else:
            self._tombstones.spend(room.room, given_up)
        for name, generation in given_up.uses.items():
            use = (name, room.room, generation)
            self._tombstones.meet(use)
            if self._ranks.get(name) is not None and not self._may_land(use):
                self._ranks.send(self._drained(use))
        return dict.fromkeys(given_up.uses, given_up.instance)

    # Small helpers.

    def _keep(self, message: wire.Request, rank: DecodeRank) -> None:
        self._put(self._pending, message, rank)

    def _put(self, kept: PendingRequests, message: wire.Request, rank: DecodeRank) -> None:
        for name, request in kept.put(rank.name, message, self._context.now()):
            reason = Reason("room.pending", "too many requests wait for prefill", {"room": str(request.room)})
            dropped = self._ranks.get(name)
            if dropped is not None:
                self.answer(dropped, request, reason)

    def _room(self, number: int) -> SendingState | None:
        room = self._rooms.get(number)
        if room is not None and not room.begun:
            self.open(room)
        return room
