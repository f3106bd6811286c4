"""The prefill role: which rooms are open, what decode asked for, and what goes out."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Set
from functools import partial
from typing import TYPE_CHECKING, Any

from statelink import wire
from statelink.backend import Moved, Side
from statelink.errors import MismatchError, Reason, StatelinkError
from statelink.plan import Items, required, whole

from ._deadlines import Deadlines, waits_of
from ._destinations import Destination, Destinations
from ._early import Early
from ._hook_room import SendRoom
from ._mover import reason_of
from ._outgoing import Outgoing
from ._past import REMEMBERED, Past
from ._sending import Delivery, Push, Sending
from ._status import ENDED, Status
from ._use import Use
from ._verify import packed

if TYPE_CHECKING:
    from statelink.backend import Transfer

    from ._delivery import Delivered
    from ._node import Node
    from ._past import End, UseId

__all__ = ["PrefillRole"]

log = logging.getLogger("statelink.link")


class PrefillRole:
    """Prefill's half of the protocol. Runs on the control thread.

    Args:
        node: The link's control thread.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._destinations = Destinations(node, self)
        self._early = Early(REMEMBERED, node.config.max_early_bytes)
        self._past = Past(node.now, node.config.deadline)
        self._outgoing = Outgoing(node, self._delivered, self._stray, self._settled)
        self._deadlines = Deadlines(node, self._expired)
        self._handlers: dict[type[wire.Message], Callable[..., None]] = {
            wire.Request: self._request,
            wire.Accepted: self._accepted,
            wire.Failed: self._failed,
            wire.Note: self._note,
        }

    # Messages.

    def handle(self, message: wire.Message, address: str | None) -> None:
        """See `Role.handle`."""
        self._destinations.handle(message)

    def from_destination(self, message: wire.Message, peer: Destination) -> None:
        """See `Watcher.from_destination`."""
        handler = self._handlers.get(type(message))
        if handler is None:
            log.debug("a %s message is not for prefill", type(message).__name__.lower())
        else:
            handler(message, peer)

    def lost(self, peer: Destination, why: str) -> None:
        """See `Watcher.lost`: its rooms fail, unless it had everything of them before."""
        self._early.forget(peer.name)
        for room in self._sending():
            delivery = room._deliveries.get(peer.name)
            if delivery is not None and not delivery.accepted:
                self.fail(room, room._reason_for("peer.lost", "decode was lost", why, peer=peer.name))

    def beat(self, now: float, late: float) -> None:
        """See `Role.beat`."""
        self._destinations.beat(now, late)
        for room in self._sending():
            if room.status is Status.FAILED and not room.quiesced:
                self._look_for_ends(room)

    def _look_for_ends(self, room: Sending) -> None:
        """Memory of a room that ended is free once the process of who would get its bytes has ended, too."""
        ended = [d for d in room._deliveries.values() if not d.unread and not d.over and d.destination.ended]
        for delivery in ended:
            delivery.over = True
            self._past.restless.discard(self._use_id(delivery))
        if ended:
            self._drain(room)

    # Rooms.

    def open(self, room: Sending) -> None:
        """The engine opened a room."""
        self._deadlines.add(room)
        early = self._early.take(room.room)
        if room.status in ENDED and room.reason is not None:  # decode gave it up since the engine made it
            for name, request in early.items():
                peer = self._destinations.get(name)
                if peer is not None:
                    self._past_of(room.room, peer)  # it knows
                    self._answer(peer, request, room.reason)
            return
        end = self._past.end_of(room.room)
        if end is not None and end.remote and not early:
            self.fail(room, end.reason, told=end.told, ranks=end.ranks)
            return
        for name, request in early.items():
            peer = self._destinations.get(name)
            if peer is not None:
                self._deliver_to(room, peer, request)

    def pushed(self, room: Sending, push: Push) -> None:
        """The engine pushed."""
        if room.status in ENDED:
            self._node.hold_pushes(-1)  # it failed in the meantime
            room._settle()
            return
        room._queue.append(push)
        room._settle()
        self._pump(room)

    def declines(self, request: wire.Request) -> bool:
        """See `Watcher.declines`."""
        return self._past.admit((request.sender, request.room, request.generation))

    def _request(self, message: wire.Request, peer: Destination) -> None:
        if not self._past.admit((peer.name, message.room, message.generation)):
            return  # it came twice, or after its end: what was said of it stands
        room = self._room(message.room)
        if room is not None and room.status not in ENDED:
            self._deliver_to(room, peer, message)
            return
        end = self._past_of(message.room, peer)
        if room is not None:
            self._answer(peer, message, room.reason or room._reason_for("room.ended", "the room has ended on prefill"))
            return
        if end is not None:
            self._answer(peer, message, end.reason)
            return
        for name, request in self._early.put(peer.name, message):
            who = {"room": str(request.room)}
            reason = Reason("room.early", "too many requests wait for prefill to open them", who)
            peer_of = self._destinations.get(name)
            if peer_of is not None:
                self._answer(peer_of, request, reason)

    def _answer(self, peer: Destination, request: wire.Request, reason: Reason) -> None:
        """A request that will not be served: say why, and that nothing is in flight."""
        use = Use(sender=self._node.name, to=peer.name, room=request.room, generation=request.generation)
        self._send(wire.Failed(**use, reason=reason))
        self._send(wire.Drained(**use))

    def _deliver_to(self, room: Sending, peer: Destination, request: wire.Request) -> None:
        try:
            delivery = self._check_request(room, peer, request)
        except BaseException as error:  # also a defect of a strategy, whose hooks are made and opened here
            reason = reason_of(error, room=room.room, peer=peer.name, backend=self._node.backend.name)
            reason = room._explained(reason, peer.party)
            self._answer(peer, request, reason)
            self.fail(room, reason)
            self._past_of(room.room, peer)  # it knows
            return
        room._deliveries[peer.name] = delivery
        if len(room._deliveries) == peer.expected:
            room._prefix = request.prefix
            room._set(Status.WAITING)
            room._settle()
            self._pump(room)

    def _check_request(self, room: Sending, peer: Destination, request: wire.Request) -> Delivery:
        plan = peer.plan
        if plan is None:
            raise StatelinkError("a request came before its sender was attached", code="room.unattached")
        if request.tokens != room.tokens:
            raise MismatchError(
                "the two sides disagree on the number of tokens",
                cause=f"{room.tokens} on prefill, {request.tokens} on decode",
                code="room.tokens",
            )
        whole(request.prefix, "the prefix of a request", 0, room.tokens, code="room.prefix")
        for other in room._deliveries.values():
            if other.destination.card.inventory.instance != peer.card.inventory.instance:
                raise MismatchError("two decode instances ask for one room", code="room.instances")
            if other.request.prefix != request.prefix:
                raise MismatchError(
                    "the decode ranks of one room disagree on the prefix",
                    cause=f"{other.request.prefix} and {request.prefix}",
                    code="room.prefix",
                )
        targets: dict[str, Items] = {}
        for name, component_plan in plan.components.items():
            given = request.items.get(name)
            if given is None:
                raise MismatchError(f"a request lacks component {name!r}", code="room.items", component=name)
            listed = Items(wire.unpack_items(given), given.first)
            targets[name] = required(component_plan.target, request.tokens, request.prefix, listed)
        delivery = Delivery(peer, request, plan, targets, {})
        wake = partial(self._outgoing.wake, weakref.ref(room), peer.name)
        try:
            for name in plan.components:
                hook = self._node.strategies[name].sender()
                context = SendRoom(self._node, request, peer.name, name, wake)
                delivery.contexts[name] = context
                hook.open(context, request.prepared.get(name, b""))
                delivery.hooks[name] = hook
        except BaseException:
            delivery.cancelled.set()
            self._outgoing.abort(room, delivery)  # those that are open already
            self._outgoing.release(delivery)
            raise
        return delivery

    def _pump(self, room: Sending) -> None:
        """Send what is queued, in order, once every destination has asked."""
        while room._queue and room.status in (Status.WAITING, Status.TRANSFERRING):
            push = room._queue[0]
            if not room._is_ready(push.ready, lambda: self._pump(room)):
                return
            room._queue.popleft()
            room._set(Status.TRANSFERRING)
            self._node.hold_pushes(-1)
            for delivery in room._deliveries.values():
                self._outgoing.start(room, delivery, push)

    def _delivered(self, room: Sending, delivery: Delivery, push: Push, result: Delivered) -> None:
        delivery.jobs -= 1
        self._node.hold_pushes(-1)
        moving = result.moving
        delivery.pending.extend(moving.pending)
        if moving.unsettled:
            delivery.unknown = True
            self._unsettled(delivery, moving.unsettled, moving.reason.cause if moving.reason is not None else "")
        for transfer in moving.strays:
            self._stray(delivery, transfer)
        for name, moved in result.moved.items():
            for tally in (delivery.moved, room._moved):
                before = tally.get(name, Moved(0, 0))
                tally[name] = Moved(before.nbytes + moved.nbytes, before.blocks + moved.blocks)
        use = self._use(delivery)
        if moving.reason is not None:
            named = {
                "room": str(room.room),
                "peer": delivery.destination.name,
                "component": ", ".join(result.grains),
                **moving.reason.who,
            }
            who = {key: value for key, value in named.items() if value}
            why = moving.reason
            self.fail(room, Reason(why.code, why.what, who, why.cause, why.hint))
        elif room.status is Status.TRANSFERRING and not moving.pending:
            if delivery is next(iter(room._deliveries.values())):
                room._chunks += 1
            chunk = wire.Chunk(
                **use, number=push.number, grains=result.grains, layers=push.layers, nbytes=moving.nbytes
            )
            self._send(chunk)
            if push.last:
                finished = wire.Finished(
                    **use,
                    digest=delivery.plan.digest,
                    moved=delivery.moved,
                    chunks=push.number + 1,
                    digests={name: packed(digest) for name, digest in delivery.digests.items()},
                    transport=delivery.destination.carried(self._node),
                )
                self._send(finished)
                delivery.finished = True
        self._drain(room)

    def _accepted(self, message: wire.Accepted, peer: Destination) -> None:
        room, delivery = self._find(message, peer)
        if room is None or delivery is None or not delivery.finished:
            return
        delivery.accepted = True
        if all(each.accepted for each in room._deliveries.values()):
            room._set(Status.SUCCEEDED)
            room._settle()

    def _note(self, message: wire.Note, peer: Destination) -> None:
        room, delivery = self._find(message, peer)
        if room is None or delivery is None or message.component not in delivery.hooks:
            return
        failed = partial(self.fail, room)
        self._outgoing.note(delivery, message.component, message.payload, failed)

    def _failed(self, message: wire.Failed, peer: Destination) -> None:
        room, delivery = self._find(message, peer)
        if delivery is not None and room is not None:
            self.fail(room, message.reason)
            if delivery.drained:
                self._send(wire.Drained(**self._use(delivery)))  # it was lost, or decode was: say it again
            return  # else when its jobs have ended
        use = (peer.name, message.room, message.generation)
        request = self._early.get(message.room, peer.name)
        # Said again, or late, it is nothing to the next use of the id.
        if self._past.admit(use) if request is None else request.generation == message.generation:
            self._given_up(message, peer)
        if use not in self._past.restless:
            said = Use(sender=self._node.name, to=peer.name, room=message.room, generation=message.generation)
            self._send(wire.Drained(**said))

    def _given_up(self, message: wire.Failed, peer: Destination) -> None:
        """A rank of decode gave up before prefill opened the room, or before it asked: the room will not be served.

        Whoever speaks of it later, the engine here or another rank of that instance, must not wait for this one.
        """
        instance = peer.card.inventory.instance
        room = self._room(message.room)
        if room is not None and room.status not in ENDED:
            asked = room._deliveries.values()
            same = all(each.destination.card.inventory.instance == instance for each in asked)
            if same and peer.name not in room._deliveries and len(asked) < peer.expected:
                self.fail(room, message.reason, told={peer.name}, ranks=peer.expected)
            return
        end = self._past_of(message.room, peer)
        if room is not None or (end is not None and not end.remote):
            return  # prefill gave it up, and this rank knows
        requests = self._early.take(message.room)
        for name, request in requests.items():
            another = self._destinations.get(name)
            if another is not None and another is not peer:
                self._answer(another, request, message.reason)
        told = {peer.name, *requests, *(end.told if end is not None else ())}
        reason = end.reason if end is not None else message.reason
        self._past.ended(message.room, reason, remote=True, told=told, instance=instance, ranks=peer.expected)

    def fail(self, room: Sending, reason: Reason, *, told: Set[str] = frozenset(), ranks: int = 0) -> None:
        """End a room in failure, tell every destination, and stop its transfers.

        Args:
            room: The room.
            reason: Why.
            told: Ranks of decode that know, though they never asked for the room.
            ranks: How many ranks that instance has.
        """
        if not room._fail(reason) or room._reason is None:
            return
        self._node.hold_pushes(-len(room._queue))
        reason = room._reason
        room._queue.clear()
        for delivery in room._deliveries.values():
            delivery.cancelled.set()
            self._outgoing.abort(room, delivery)
            self._send(wire.Failed(**self._use(delivery), reason=reason))
        told = told | room._deliveries.keys()
        if not told or len(told) < max([ranks, *(each.destination.expected for each in room._deliveries.values())]):
            self._past.ended(room.room, reason, remote=False, told=told)  # the others have yet to ask
        self._drain(room)

    def _drain(self, room: Sending) -> None:
        """Tell destinations of a failed room when nothing is in flight any more, and work out quiescence."""
        for delivery in room._deliveries.values():
            if delivery.pending and not delivery.jobs and not delivery.over:
                self._outgoing.look_after(delivery, partial(self._drain, room))
            elif delivery.strays and not delivery.watched:
                delivery.watched = True
                self._outgoing.watch(room, delivery)
            if room.status is Status.FAILED and delivery.still and not delivery.drained:
                delivery.drained = True
                self._send(wire.Drained(**self._use(delivery)))
            if room.status is Status.FAILED and delivery.unread and not delivery.released:
                delivery.released = True
                self._outgoing.release(delivery)
        room._settle()

    def _unsettled(self, delivery: Delivery, sides: frozenset[Side], why: str) -> None:
        for side in sides:
            delivery.unsettled.setdefault(side, why or "the backend does not say why")
        if Side.TARGET in sides:
            self._past.restless.add(self._use_id(delivery))

    def _stray(self, delivery: Delivery, transfer: Transfer) -> None:
        """A transfer has ended after its room; its backend may yet learn that its bytes have stopped."""
        outcome = transfer.outcome
        if outcome is not None and outcome.unsettled:
            delivery.strays.append(transfer)
            self._unsettled(delivery, outcome.unsettled, outcome.reason)

    def _settled(self, room: Sending, delivery: Delivery) -> None:
        delivery.watched = False
        if not delivery.unknown:
            delivery.unsettled.clear()
            self._past.restless.discard(self._use_id(delivery))
        self._drain(room)

    # The end.

    def _expired(self, room: Sending) -> None:
        asked = len(room._deliveries)
        cause = {
            Status.BOOTSTRAPPING: f"{asked} decode ranks have asked for it" if asked else "decode never asked for it",
            Status.WAITING: "the engine never pushed",
            Status.TRANSFERRING: "the transfer or its acknowledgement did not end"
            if room._complete
            else "the engine never made the last push",
        }[room.status]
        if room._queue and room.status is not Status.BOOTSTRAPPING:  # every destination has asked
            cause = "the engine's ready event never came"
        hooks = ((f"{key}: {name}", hook) for key, d in room._deliveries.items() for name, hook in d.hooks.items())
        cause += waits_of(hooks)
        self.fail(room, room._reason_for("room.deadline", "a room passed its deadline on prefill", cause))

    def busy(self) -> bool:
        """See `Role.busy`."""
        return any(d.moving for room in self._sending() for d in room._deliveries.values())

    def close(self) -> None:
        """See `Role.close`."""
        moving = {name for room in self._sending() for name, d in room._deliveries.items() if not d.still}
        self._destinations.close(moving | {name for name, _, _ in self._past.restless})

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """See `Role.ranks`."""
        return self._destinations.ranks(now)

    def snapshot(self) -> dict[str, str]:
        """Peers and how they stand."""
        return self._destinations.snapshot()

    def load(self) -> dict[str, int]:
        """What is kept for rooms that are not open here, by kind."""
        return {
            "early": len(self._early),
            "early_bytes": self._early.nbytes,
            **self._past.load(),
        }

    def knows(self, name: str) -> bool:
        """See `Role.knows`."""
        return self._destinations.knows(name)

    # Small helpers.

    def _send(self, message: wire.Message) -> None:
        if not self._node.send(message):
            # It would wait in vain for what it was not told. Not at once: who called is in the middle of something.
            self._node.post(lambda: self._destinations.unreachable(message.to))

    def _past_of(self, room: int, peer: Destination) -> End | None:
        return self._past.end_for(room, peer.name, peer.expected, peer.card.inventory.instance)

    def _room(self, number: int) -> Sending | None:
        room = self._node.rooms.get(number)
        return room if isinstance(room, Sending) else None

    def _sending(self) -> list[Sending]:
        with self._node.lock:
            return [room for room in self._node.rooms.values() if isinstance(room, Sending)]

    def _find(
        self, message: wire.Accepted | wire.Failed | wire.Note, peer: Destination
    ) -> tuple[Sending | None, Delivery | None]:
        room = self._room(message.room)
        delivery = room._deliveries.get(peer.name) if room is not None else None
        if delivery is not None and delivery.request.generation != message.generation:
            return None, None
        return room, delivery

    @staticmethod
    def _use_id(delivery: Delivery) -> UseId:
        return delivery.destination.name, delivery.request.room, delivery.request.generation

    def _use(self, delivery: Delivery) -> Use:
        return Use(
            sender=self._node.name,
            to=delivery.destination.name,
            room=delivery.request.room,
            generation=delivery.request.generation,
        )
