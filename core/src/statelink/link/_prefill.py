"""The prefill role: which rooms are open, what decode asked for, and what goes out."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from statelink import wire
from statelink.backend import Moved, Side
from statelink.errors import MismatchError, Reason, StatelinkError
from statelink.plan import Items, checked_int, required

from ._asking import Asking
from ._deadlines import Deadlines, waits_of
from ._destinations import Destination, Destinations
from ._hook_room import SendRoom
from ._mover import reason_of
from ._outgoing import Outgoing
from ._rendezvous import Explaining
from ._sending import Delivery, Push, Sending
from ._status import ENDED, Status
from ._use import Use
from ._verify import packed

if TYPE_CHECKING:
    from statelink.backend import Transfer

    from ._delivery import Delivered
    from ._node import Node
    from ._past import UseId

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
        self._asking = Asking(node, self._destinations, self._send, self._bound, self._end)
        self._outgoing = Outgoing(node, self._delivered, self._stray, self._settled)
        self._deadlines = Deadlines(node, self._expired)
        self._handlers: dict[type[wire.Message], Callable[..., None]] = {
            wire.Request: self._asking.request,
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
        self._asking.early.forget(peer.name)
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
            self._asking.past.restless.discard(self._use_id(delivery))
        if ended:
            self._drain(room)

    # Rooms.

    def open(self, room: Sending) -> None:
        """The engine opened a room."""
        self._deadlines.add(room)
        self._asking.open(room)

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
        return self._asking.past.admit((request.sender, request.room, request.generation))

    def _bound(self, room: Sending, asked: list[tuple[Destination, wire.Request]]) -> None:
        """A room belongs to these ranks from here on: serve them, or end it for all of them."""
        deliveries: dict[str, Delivery] = {}
        for peer, request in asked:
            try:
                deliveries[peer.name] = self._check_request(room, peer, request, deliveries)
            except BaseException as error:  # also a defect of a strategy, whose hooks are made and opened here
                for made in deliveries.values():
                    self._discard(room, made)
                reason = reason_of(error, room=room.room, peer=peer.name, backend=self._node.backend.name)
                self.fail(room, room._explained(reason, peer.party))
                return
        room._deliveries.update(deliveries)
        self._asking.bound(room)
        room._prefix = asked[0][1].prefix
        room._set(Status.WAITING)
        room._settle()
        self._pump(room)

    def _check_request(
        self, room: Sending, peer: Destination, request: wire.Request, others: Mapping[str, Delivery]
    ) -> Delivery:
        plan = peer.plan
        if plan is None:
            raise StatelinkError("a request came from who is not attached any more", code="room.unattached")
        if request.tokens != room.tokens:
            raise MismatchError(
                "the two sides disagree on the number of tokens",
                cause=f"{room.tokens} on prefill, {request.tokens} on decode",
                code="room.tokens",
            )
        checked_int(request.prefix, "the prefix of a request", 0, room.tokens, code="room.prefix")
        for other in others.values():
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
            self._discard(room, delivery)
            raise
        return delivery

    def _discard(self, room: Sending, delivery: Delivery) -> None:
        """Let go of a delivery that never began, and of those hooks that are open already."""
        delivery.cancelled.set()
        self._outgoing.abort(room, delivery)
        self._outgoing.release(delivery)

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
                **use, number=push.number, granules=result.grains, layers=push.layers, nbytes=moving.nbytes
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
                self._say_drained(delivery)  # it was lost, or decode was: say it again
            return  # else when its jobs have ended
        past, use = self._asking.past, (peer.name, message.room, message.generation)
        self._asking.gave_up(message, peer)
        if use not in past.restless:
            said = Use(sender=self._node.name, to=peer.name, room=message.room, generation=message.generation)
            self._send(wire.Drained(**said, met=message.generation if past.met(use) else 0))

    def fail(self, room: Sending, reason: Reason) -> None:
        """End a room in failure, tell every destination, and stop its transfers."""
        self._end(room, reason, {}, 0)

    def _end(self, room: Sending, reason: Reason, told: Mapping[str, str], ranks: int) -> None:
        """The same, where some ranks of decode know: they are given with their instances, and how many there are."""
        if not room._fail(reason) or room._reason is None:
            return
        self._node.hold_pushes(-len(room._queue))
        reason = room._reason
        room._queue.clear()
        for delivery in room._deliveries.values():
            delivery.cancelled.set()
            self._outgoing.abort(room, delivery)
            self._send(wire.Failed(**self._use(delivery), reason=reason, met=delivery.request.generation))
        if not room._deliveries:
            self._asking.ended(room, reason, told, ranks)
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
                self._say_drained(delivery)
            if room.status is Status.FAILED and delivery.unread and not delivery.released:
                delivery.released = True
                self._outgoing.release(delivery)
        room._settle()

    def _unsettled(self, delivery: Delivery, sides: frozenset[Side], why: str) -> None:
        for side in sides:
            delivery.unsettled.setdefault(side, why or "the backend does not say why")
        if Side.TARGET in sides:
            self._asking.past.restless.add(self._use_id(delivery))

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
            self._asking.past.restless.discard(self._use_id(delivery))
        self._drain(room)

    # The end.

    def _expired(self, room: Sending) -> None:
        cause = {
            Status.BOOTSTRAPPING: self._asking.unasked(room),
            Status.WAITING: "the engine never pushed",
            Status.TRANSFERRING: "the transfer or its acknowledgement did not end"
            if room._complete
            else "the engine never made the last push",
        }[room.status]
        if room._queue and room.status is not Status.BOOTSTRAPPING:  # every destination has asked
            cause = "the engine's ready event never came"
        hooks = ((f"{key}: {name}", hook) for key, d in room._deliveries.items() for name, hook in d.hooks.items())
        cause += waits_of(hooks)
        hint = ""
        rendezvous = self._node.rendezvous
        if room.status is Status.BOOTSTRAPPING and isinstance(rendezvous, Explaining):
            said, hint = rendezvous.explain(None)
            cause += f"; {said}" if said else ""
        self.fail(room, room._reason_for("room.deadline", "a room passed its deadline on prefill", cause, hint))

    def busy(self) -> bool:
        """See `Role.busy`."""
        return any(d.moving for room in self._sending() for d in room._deliveries.values())

    def close(self) -> None:
        """See `Role.close`."""
        moving = {name for room in self._sending() for name, d in room._deliveries.items() if not d.still}
        self._destinations.close(moving | {name for name, _, _ in self._asking.past.restless})

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """See `Role.ranks`."""
        return self._destinations.ranks(now)

    def snapshot(self) -> dict[str, str]:
        """Peers and how they stand."""
        return self._destinations.snapshot()

    def load(self) -> dict[str, int]:
        """What is kept for rooms that are not open here, by kind."""
        return {
            "pending_requests": len(self._asking.early),
            "pending_request_bytes": self._asking.early.nbytes,
            **self._asking.past.load(),
        }

    def knows(self, name: str) -> bool:
        """See `Role.knows`."""
        return self._destinations.knows(name)

    def missing(self, room: Sending) -> int | None:
        """See `Asking.missing`."""
        return self._asking.missing(room)

    # Small helpers.

    def _send(self, message: wire.Message) -> None:
        if not self._node.send(message):
            # It would wait in vain for what it was not told. Not at once: who called is in the middle of something.
            self._node.post(lambda: self._destinations.unreachable(message.to))

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

    def _say_drained(self, delivery: Delivery) -> None:
        self._send(wire.Drained(**self._use(delivery), met=delivery.request.generation))

    def _use(self, delivery: Delivery) -> Use:
        return Use(
            sender=self._node.name,
            to=delivery.destination.name,
            room=delivery.request.room,
            generation=delivery.request.generation,
        )
