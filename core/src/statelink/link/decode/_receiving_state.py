"""Decode's side of one room: its prefill instance, and a delivery from each prefill rank that owes it bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING

from statelink import wire
from statelink.link._reasons import PeerInfo, hooks_wait_for, reason_of
from statelink.link._room_state import RoomState
from statelink.link._status import ENDED, Status
from statelink.link.peers import InstanceState

from ._in_flight import Proof
from ._incoming import IncomingDelivery

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.link._room_table import RoomTable

    from ._instance import Instance, PrefillRank
    from ._postponed import Declines
    from ._receiving import Accepted
    from ._unmet import UnmetUses

__all__ = ["AboutRoom", "ReceivingState"]

AboutRoom = wire.Chunk | wire.Finished | wire.Failed | wire.Drained | wire.Note
"""Messages of writers about rooms."""


class ReceivingState(RoomState):
    """Owns its deliveries. Belongs to the control thread; see `RoomState`.

    Args:
        context: The link's parts.
        table: The rooms of the link; told of every change.
        unmet: Keeps uses of ids that ended, and for which prefill may not have had a room.
        declines: Tells prefill of uses that ended before it was asked.
        explain: Says why an instance is not ready, and gives a hint what to look at.
        generation: The number that this side drew for this use of the room id.
    """

    role = "decode"
    _accepted: Accepted | None = None
    _requested = False
    """Whether a data thread was asked to prepare the requests. From then on `_deliveries` is complete."""
    _unprepared: Reason | None = None
    """Why `_prepare` failed. It writes this, maybe on a data thread, and the control thread reads it after that job."""
    _instance: Instance | None = None
    _flushing = False
    """Whether a data thread makes the writers' bytes visible to the device, or has."""
    _visible = False
    """Whether the writers' bytes are visible to the device."""

    def __init__(
        self,
        context: Context,
        table: RoomTable,
        unmet: UnmetUses,
        declines: Declines,
        explain: Callable[[Instance], tuple[str, str]],
        *,
        room: int,
        tokens: int | None,
        generation: int,
        deadline: float | None,
    ) -> None:
        super().__init__(context, table, room, tokens, deadline)
        self.generation = generation
        self._unmet = unmet
        self._declines = declines
        self._explain = explain
        self._deliveries: dict[str, IncomingDelivery] = {}

    # Towards the request.

    def open(self, instance: Instance) -> None:
        """Set the instance that the room is requested from. Control thread; `accepted` may run before or after this."""
        self._instance = instance
        instance.rooms[self] = None
        if instance.state is InstanceState.REFUSED and instance.reason is not None:
            self.fail(instance.reason)
        else:
            self._maybe_request()

    def accepted(self, accepted: Accepted) -> None:
        """Take the memory that the engine has named, after `RoomMemory.name` on the engine's thread. Control thread."""
        self.memory.heard()
        self._accepted = accepted
        self.prefix = accepted.prefix
        if accepted.least == accepted.tokens:
            self.tokens = accepted.tokens
        if self.status in ENDED:  # until then, it stays in use
            self.prove_quiesced()
        self._maybe_request()

    def instance_ready(self, instance: Instance) -> None:
        """See `InstanceUser.instance_ready`."""
        if self.status not in ENDED:
            self._maybe_request()
        elif not self.memory.proven and self.reason is not None:
            for rank in instance.parts:
                delivery = self._deliveries.get(rank.name)
                if delivery is not None and not delivery.in_flight.drained:
                    # If the rank was lost and has come back, its Drained may be lost. Repeat Failed to get another.
                    delivery.tell_failed(self.reason)

    def instance_refused(self, reason: Reason) -> None:
        """See `InstanceUser.instance_refused`."""
        self.fail(reason)

    def instance_silent(self, instance: Instance, limit: float) -> None:
        """See `InstanceUser.instance_silent`. A room that was opened since waits for as long."""
        if self.status not in ENDED and not self._requested and self.context.now() - self.opened > limit:
            cause, hint = self._explain(instance)
            self.fail_late("peer.unreachable", "prefill was not reached", cause, hint)

    def _maybe_request(self) -> None:
        """Request the room, once the instance is ready, the engine has named memory, and its event says it is free."""
        instance, accepted = self._instance, self._accepted
        if self.status in ENDED or self._requested or instance is None:
            return
        if instance.state is not InstanceState.READY or instance.suspect:
            return
        self.step(Status.WAITING)
        if accepted is None:
            return
        if accepted.ready is not None and not self._is_ready(accepted.ready, self._maybe_request):
            return
        self._requested = True
        fail = _fail_weakly(self)
        try:
            ranks = [rank for rank in instance.ranks.values() if rank.part is not None]
            deliveries = [IncomingDelivery(self.context, rank, accepted, self.ended, fail) for rank in ranks]
        except BaseException as error:  # a defect of a strategy, whose hooks are made here
            self.fail(reason_of(error, room=self.room, backend=self.context.backend.name))
            return
        prompt = True
        for delivery in deliveries:
            self._deliveries[delivery.rank.name] = delivery
            prompt = prompt and delivery.prompt

        workers, key = self.context.workers, ("room", self.room)
        if prompt and workers.fence_here(key, self._prepare):
            self._prepared()
        else:
            workers.fences.submit_job(key, self._prepare_there)

    def _prepare(self) -> None:
        """Ask all hooks, and grant the memory. A data thread, or the control thread if every hook is prompt."""
        try:
            for delivery in self._deliveries.values():
                delivery.prepare()
        except BaseException as error:
            self._unprepared = reason_of(error, room=self.room, backend=self.context.backend.name)

    def _prepare_there(self) -> None:
        """As `_prepare`, on a data thread."""
        self._prepare()
        self.context.post_job(self._prepared)

    def _prepared(self) -> None:
        """`_prepare` has ended; the room may have failed meanwhile. Control thread."""
        if self._unprepared is not None:
            self.fail(self._unprepared)
        else:
            self._request()

    def _request(self) -> None:
        if self.status in ENDED:
            return  # nobody was asked; where there are grants, they are being revoked
        for name, delivery in self._deliveries.items():
            if not delivery.ask(self.deadline - self.opened, self._unmet.named(self.room, name)):
                self.fail(self.reason_for("peer.send", "a request could not be sent", peer=name))
                return
        if not self._deliveries:  # by the plan, no prefill rank owes this rank a byte
            self._maybe_succeed()

    # What writers say.

    def handle(self, message: AboutRoom, name: str) -> None:
        """Handle a writer's message about this room."""
        delivery = self._deliveries.get(name)
        if delivery is None:
            return
        if not isinstance(message, (wire.Failed, wire.Drained)) or message.met == self.generation:
            delivery.met = True
        if isinstance(message, wire.Chunk):
            self._arrived(delivery, message, message.number)
        elif isinstance(message, wire.Finished):
            self._arrived(delivery, message, message.chunks - 1)
            reason = self._check_tokens(delivery, message) or delivery.finish(message, self._landed)
            if reason is not None:
                self.fail(reason)
            if self.status not in ENDED and delivery.finished:
                delivery.finish_hooks(self._hook_ended)
            self._maybe_succeed()
        elif isinstance(message, wire.Failed):
            self.fail(message.reason)
        elif isinstance(message, wire.Drained):
            self.drained(name, Proof.DRAINED)
        elif self.status not in ENDED:
            delivery.note(message.component, message.payload, self._hook_ended)

    def _landed(self, delivery: IncomingDelivery) -> None:
        """All bytes of a writer have landed whose last message came before them. Control thread."""
        delivery.land()
        self._maybe_succeed()

    def _check_tokens(self, delivery: IncomingDelivery, message: wire.Finished) -> Reason | None:
        """Take N from a writer's last message, if decode knew only the number of pages. Returns why it cannot be."""
        accepted = self._accepted
        if accepted is None or accepted.least == accepted.tokens:
            return None
        said, known = message.tokens, self.tokens
        if accepted.least <= said <= accepted.tokens and known in (None, said):
            self.tokens = said
            return None
        cause = f"{said} on prefill, {accepted.least} to {accepted.tokens} on decode, by the number of its pages"
        if known is not None:
            cause = f"{known} on one rank of prefill, {said} on another"
        what, peer = "the two sides disagree on the number of tokens", delivery.rank.name
        return self.reason_for("room.tokens", what, cause, peer=peer)

    def _arrived(self, delivery: IncomingDelivery, message: wire.Chunk | wire.Finished, number: int) -> None:
        """A message says that a push is visible here."""
        self.step(Status.TRANSFERRING)
        self._chunks = max(self._chunks, number + 1)
        delivery.chunk(number, message.granules, message.layers, self._hook_ended)

    def drained(self, name: str, proof: Proof) -> None:
        """No write of a rank can land any more."""
        delivery = self._deliveries.get(name)
        if delivery is not None:
            delivery.in_flight.prove(proof)
            self._after_change()

    def rank_lost(self, rank: PrefillRank, why: str) -> None:
        """See `InstanceUser.rank_lost`. The room goes on if it waits for nothing from that rank."""
        delivery = self._deliveries.get(rank.name)
        if delivery is not None and not delivery.finished:
            peer = rank.name or rank.endpoint.address
            self.fail(self.reason_for("peer.lost", "prefill was lost", why, peer=peer))

    def waits_at(self, addresses: Container[str]) -> bool:
        """See `InstanceUser.waits_at`."""
        return any(rank.address in addresses for rank in self.undrained())

    def move(self, instance: Instance) -> None:
        """See `InstanceUser.move`."""
        self._instance = instance
        instance.rooms[self] = None

    @property
    def deliveries(self) -> list[IncomingDelivery]:
        """The ranks that write for the room. Any thread."""
        return list(self._deliveries.values())

    def undrained(self) -> list[PrefillRank]:
        """Ranks whose writes may still land."""
        return [delivery.rank for delivery in self._deliveries.values() if not delivery.in_flight.drained]

    # The end.

    def _hook_ended(self, reason: Reason | None) -> None:
        """A hook or a comparison of digests ended, with a reason if it failed. Control thread."""
        if reason is not None:
            self.fail(reason)
        self._maybe_succeed()

    def _maybe_succeed(self) -> None:
        """Succeed, if every delivery is complete. Starts the comparisons of digests before that."""
        deliveries = self._deliveries.values()
        open_ = self.status not in ENDED
        if open_ and not self._visible and all([delivery.complete for delivery in deliveries]):
            self._flush()
        if open_ and self._visible and self.context.config.verify != "off":
            for delivery in deliveries:
                delivery.verify(self._hook_ended)
        if self.status in ENDED or not self._visible or not all([delivery.complete for delivery in deliveries]):
            self._after_change()
            return
        for delivery in deliveries:
            self._count_moved(delivery.moved)
        self.prove_quiesced()
        self.step(Status.SUCCEEDED)
        for delivery in deliveries:
            delivery.say_received()
            delivery.revoke(self.drained)
        self._table.forget(self)
        self._leave()

    def _flush(self) -> None:
        """Make what the writers wrote visible to the device: on a data thread, where anything has to be done."""
        flush = self.context.flush
        if flush is None:
            self._visible = True
        elif not self._flushing:
            self._flushing = True
            workers, who = self.context.workers, {"room": self.room, "backend": self.context.backend.name}
            workers.run(workers.checks, ("flush", self.room), flush, self._flushed, **who)

    def _flushed(self, _: None, reason: Reason | None) -> None:
        """The flush has ended. Control thread."""
        self._visible = reason is None
        if reason is not None:
            self.fail(reason)
        else:
            self._maybe_succeed()

    def fail(self, reason: Reason) -> None:
        """See `RoomState.fail`. Sends Failed to every writer, and revokes the grants or waits until all drained."""
        ended = self._end_in_failure(reason)
        if ended is None:
            return
        if self._deliveries or self._instance is None:
            self._unmet.ended(self.room, self.generation, self._not_met())
        for delivery in self._deliveries.values():
            delivery.tell_failed(ended)
            delivery.revoke(self.drained)
            delivery.abort(self._hook_ended)
        self._after_change()
        if not self._deliveries and self._instance is not None:
            # A room may have no deadline, and its instance may never be there.
            until = min(self.deadline, self.context.now() + self.context.config.deadline)
            self._declines.add(self.room, self.generation, self._instance, ended, until)
        seconds = self.context.config.take_back_after
        if seconds is not None and not self.memory.proven:
            self.context.after(seconds, lambda: self._take_back_after(seconds))

    def _take_back_after(self, seconds: float) -> None:
        """Take the memory back, if it has not quiesced, as the operator chose with 'take_back_after'."""
        if not self.memory.quiesced:
            self._want_back("take_back_after", f"{seconds:.1f} s after the failure")

    def _touches(self) -> bool:
        return any(delivery.in_flight.working for delivery in self.deliveries)

    def _not_met(self) -> list[str] | None:
        """Names of ranks that have not said that they have a room for this use; ``None`` if no rank was asked."""
        return [name for name, delivery in self._deliveries.items() if not delivery.met] if self._deliveries else None

    def abort(self, why: str) -> None:
        """See `RoomState.abort`."""
        self.fail(self.reason_for("room.aborted", "decode aborted the request", why))

    def expire(self) -> None:
        """See `RoomState.expire`."""
        instance = self._instance
        if instance is not None and instance.state is not InstanceState.READY and not self._requested:
            cause, hint = self._explain(instance)
        else:
            hooks = (
                (f"{key}: {name}", hook)
                for key, delivery in self._deliveries.items()
                for name, hook in delivery.hooks.items()
            )
            cause, hint = f"it still waits for {self.waits_for()}{hooks_wait_for(hooks)}", ""
        met = any(each.met for each in self._deliveries.values())
        if self._accepted is None and not hint:
            hint = "call accept() once memory is allocated"
        elif self._requested and self.context.inventory.ranks > 1 and not met:
            hint = "prefill begins once every rank of this decode instance has opened and accepted the room: have they?"
        elif self._requested and not met:
            hint = "did prefill's engine call send() with this room id, and push()?"
        self.fail_late("room.deadline", "a room passed its deadline on decode", cause, hint)

    def _after_change(self) -> None:
        """Update quiescence. Leave the instance, if the room has ended and there is proof that it has quiesced.

        Without that proof, the room stays with the instance, which repeats Failed to ranks that have not drained.
        """
        self.prove_quiesced()
        if self.status in ENDED:
            self._leave()

    def _leave(self) -> None:
        for delivery in self._deliveries.values():
            delivery.tell_released()
        if self.memory.proven and self._instance is not None:
            self._instance.rooms.pop(self, None)

    def _untouched(self) -> bool:
        """See `RoomState._untouched`. A room that goes on needs its memory, until all bytes are visible in it."""
        in_flight = any([bool(delivery.in_flight) for delivery in self._deliveries.values()])
        over = self._visible or self.status in ENDED or self._accepted is None
        return over and not in_flight

    # Words.

    def peers(self) -> list[PeerInfo]:
        """See `RoomState.peers`."""
        ranks = [delivery.rank for delivery in list(self._deliveries.values())]
        return [rank.info for rank in ranks or (self._instance.ranks.values() if self._instance else ())]

    def transports(self) -> dict[str, str]:
        """See `RoomState.transports`."""
        return {delivery.rank.name: delivery.rank.transport for delivery in list(self._deliveries.values())}

    def carried(self) -> Iterator[tuple[str, str, int]]:
        """See `RoomState.carried`."""
        for delivery in self._deliveries.values():
            transport = delivery.rank.transport
            for name, moved in delivery.moved.items():
                yield name, transport, moved.nbytes

    def waits_for(self) -> str:
        """See `RoomState.waits_for`."""
        instance = self._instance
        if self._requested:
            return "; ".join(filter(None, (delivery.waits_for() for delivery in list(self._deliveries.values()))))
        if instance is None:
            return "prefill"
        if instance.state is not InstanceState.READY or instance.suspect:
            silent = instance.silent(self.context.channel.noted_trouble)
            how = "silent" if instance.state is InstanceState.READY else instance.state.value
            return f"prefill, which is {how}" + (
                f", and an answer from {silent}" if silent and instance.reason is None else ""
            )
        return "the engine's accept()" if self._accepted is None else "the engine's ready event"

    def held(self) -> tuple[int, str]:
        """See `RoomState.held`."""
        items = self._accepted.items if self._accepted is not None else {}
        nbytes = self.bytes_of({name: len(each.ids) for name, each in items.items()})
        deliveries = list(self._deliveries.values())  # the control thread may be adding to it
        if any(delivery.in_flight.working for delivery in deliveries):
            return nbytes, "a receive hook or a digest has not ended"
        waits = sorted(delivery.rank.name for delivery in deliveries if not delivery.in_flight.drained)
        return nbytes, f"not known to have stopped: {', '.join(waits)}"


def _fail_weakly(room: ReceivingState) -> Callable[[str, str, BaseException], None]:
    """A function that fails a room, if the room still exists. Any thread may call it."""
    # Weak reference: room, hook and context would be a cycle.
    context, reference = room.context, weakref.ref(room)

    def fail(peer: str, component: str, error: BaseException) -> None:
        def job() -> None:
            living = reference()
            if living is not None:
                living.fail(reason_of(error, room=living.room, component=component, peer=peer))

        context.post_job(job)

    return fail
