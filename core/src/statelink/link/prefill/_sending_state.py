"""Prefill's side of one room: its queue of pushes, and one delivery for each destination."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from statelink.backend import Side
from statelink.errors import MismatchError, Reason
from statelink.link._reasons import PeerInfo, hooks_wait_for, reason_of
from statelink.link._room_state import RoomState
from statelink.link._status import ENDED, Status
from statelink.link.peers import Explaining

from ._outgoing import OutgoingDelivery

if TYPE_CHECKING:
    from statelink import wire
    from statelink.link._context import Context
    from statelink.link._room_table import RoomTable
    from statelink.plan import Items

    from ._decode_ranks import DecodeRank, DecodeRanks
    from ._in_flight import UsesInFlight
    from ._push import Push, PushResult
    from ._requests import Requests
    from ._sending import PushBudget
    from ._siblings import Siblings

__all__ = ["SendingState", "Standings"]


class SendingState(RoomState):
    """Owns the queue of pushes and the deliveries. Belongs to the control thread; see `RoomState`.

    Args:
        context: The link's parts.
        table: The rooms of the link; told of every change.
        budget: Counts pushes.
        ranks: Knows the decode ranks, and sends messages to them.
        requests: Decides which instance the room belongs to.
        uses_in_flight: Uses for which writes may be in flight after their room is over.
        siblings: The other ranks of this link's own instance.

    Attributes:
        standings: How the room stands on the other ranks; ``None`` before the engine asks.
        begun: Whether the control thread knows the room.
        keepers: Link names of the decode ranks that have asked to keep the room. Any thread may read them.
    """

    role = "prefill"
    standings: Standings | None = None
    begun = False
    keepers: frozenset[str] = frozenset()
    _pushes = 0
    _complete = False
    _first: OutgoingDelivery | None = None
    """The first of the deliveries."""

    def __init__(
        self,
        context: Context,
        table: RoomTable,
        budget: PushBudget,
        ranks: DecodeRanks,
        requests: Requests,
        uses_in_flight: UsesInFlight,
        siblings: Siblings,
        *,
        room: int,
        tokens: int | None,
        deadline: float | None,
    ) -> None:
        super().__init__(context, table, room, tokens, deadline)
        self._asks_tokens = tokens is None
        """Whether decode says how many tokens the request has (N)."""
        self._budget = budget
        self._ranks = ranks
        self._requests = requests
        self._uses_in_flight = uses_in_flight
        self._siblings = siblings
        self._deliveries: dict[str, OutgoingDelivery] = {}
        self._queue: deque[Push] = deque()
        self._carriers: dict[str, str] = {}
        """The transport that carried the bytes to a destination, by its link name, once they all are there."""
        self._items: list[Mapping[str, Items]] = []
        """What was pushed: for each push, the items per component."""

    # The other ranks of this link's own instance.

    def step(self, status: Status) -> bool:
        """See `RoomState.step`. Tells the other ranks that asked."""
        taken = super().step(status)
        if taken and self._siblings.listen:
            self._siblings.changed(self)
        return taken

    def everywhere(self) -> Status:
        """The least status of the room on all ranks of this instance. A thread of the engine.

        Raises:
            ConfigError: The addresses of the other ranks are not known.
        """
        if not self._siblings.count:
            return self.status
        if self.standings is None:
            self._siblings.check()
            self.standings = Standings(self._siblings.count)
            self.context.post_job(self._siblings.ask, self)
        return self.standings.least(self.status)

    # What decode has said of the room.

    @property
    def claimed(self) -> bool:
        """See `Sending.claimed`. Any thread."""
        asked = self._requests.missing(self) is not None or bool(self._requests.connecting(self))
        return self.bound or bool(self.keepers) or asked

    def kept_by(self, rank: DecodeRank, seconds: float) -> None:
        """A rank will need the room within ``seconds``."""
        self.keepers |= {rank.name}
        self.keep(seconds)

    # The instance that the room belongs to.

    def begin(self) -> bool:
        """Note that the control thread knows the room. Returns whether that is new, and the room has not ended."""
        first, self.begun = not self.begun, True
        return first and self.status not in ENDED

    @property
    def bound(self) -> bool:
        """Whether the room belongs to a decode instance."""
        return bool(self._deliveries)

    @property
    def deliveries(self) -> list[OutgoingDelivery]:
        """One for each rank of the instance that the room belongs to. Any thread."""
        return list(self._deliveries.values())

    def delivery_to(self, peer: str) -> OutgoingDelivery | None:
        """The delivery to a rank, if the room belongs to its instance."""
        return self._deliveries.get(peer)

    def bind(self, asked: Sequence[tuple[DecodeRank, wire.Request]]) -> tuple[Reason, PeerInfo] | None:
        """Make a delivery for each rank that asked for the room.

        If that fails, returns why, and the rank that it is about. The caller then fails the room.
        """
        opened: list[OutgoingDelivery] = []
        first = asked[0][1]
        tokens = self.tokens
        if tokens is None:
            tokens = next((request.tokens for _, request in asked if not request.least), None)
        if tokens is None:
            what = "nobody says how many tokens the request has"
            cause = f"prefill takes that from decode, and decode knows its pages only: {first.least} to {first.tokens}"
            hint = "pass tokens to send() or to receive()"
            return self.reason_for("room.tokens", what, cause, hint), asked[0][0].info
        for rank, request in asked:
            try:
                if request.content != self.content:
                    raise _differing(self.content, request.content)
                delivery = OutgoingDelivery.of(self.context, rank, request, tokens)
                opened.append(delivery)
                if request.prefix != first.prefix:
                    raise MismatchError(
                        "the decode ranks of one room disagree on the prefix",
                        cause=f"{first.prefix} and {request.prefix}",
                        code="room.prefix",
                    )
                delivery.open_hooks()
            except BaseException as error:  # also a defect of a strategy, whose hooks are made and opened here
                for each in opened:
                    each.cancel()
                    each.tell_released()
                reason = reason_of(error, room=self.room, peer=rank.name, backend=self.context.backend.name)
                return reason, rank.info
        for each in opened:
            self._deliveries[each.rank.name] = each
        self._first = opened[0]
        self.tokens = tokens
        self.prefix = first.prefix
        return None

    def serve(self) -> None:
        """Begin to send to the ranks that the room belongs to."""
        self.step(Status.WAITING)
        if not self._asks_tokens or all(self._ends_right(push) for push in list(self._queue)):
            self._pump()

    # Pushes.

    def _ends_right(self, push: Push) -> bool:
        """Whether a push fits decode's N, where prefill's engine did not know it; if not, the room fails."""
        tokens, end = self.tokens, push.span[1]
        if not self._asks_tokens or tokens is None or (end == tokens if push.last else end <= tokens):
            return True
        what, which = "the two sides disagree on the number of tokens", "the last push" if push.last else "a push"
        self.fail(self.reason_for("room.tokens", what, f"{which} ends at {end} on prefill, {tokens} on decode"))
        return False

    def pushed(self, push: Push) -> None:
        """Take a push of the engine. Runs on the control thread, after `RoomMemory.name` on the engine's."""
        self.memory.heard()
        self._pushes += 1
        self._complete = push.last
        self._items.append(push.items)
        if self.status in ENDED:  # it failed in the meantime
            self._budget.count(-1)
            self.prove_quiesced()
            return
        self._queue.append(push)
        if self._deliveries and self._ends_right(push):
            self._pump()

    def _pump(self) -> None:
        """Send what is queued, in order, once every destination has asked."""
        while self._queue and self.status in (Status.WAITING, Status.TRANSFERRING):
            push = self._queue[0]
            if push.ready is not None and not self._is_ready(push.ready, self._pump):
                return
            self._queue.popleft()
            self.step(Status.TRANSFERRING)
            if len(self._deliveries) > 1:
                self._budget.count(len(self._deliveries) - 1)  # one for each destination now
            for delivery in self._deliveries.values():
                delivery.start_push(push, self._push_moved)

    def _push_moved(self, pushed: PushResult) -> None:
        """A push is visible at a destination, or failed; or a last one is landing there. Control thread."""
        delivery = self._deliveries[pushed.peer]
        if pushed.landing:
            # Decode learns from this message which transport carries the bytes.
            if self.status is Status.TRANSFERRING and not delivery.rank.finds_out():
                self._finish(delivery, pushed)
            return
        self._budget.count(-1)
        moving = pushed.moving
        delivery.take(pushed)
        if delivery.in_flight.unproven:
            self._uses_in_flight.add(delivery.use)
        self._count_moved(pushed.moved)
        if moving.reason is not None and not delivery.received:
            named = {
                "room": str(self.room),
                "peer": delivery.rank.name,
                "component": ", ".join(pushed.granules),
                **moving.reason.who,
            }
            who = {key: value for key, value in named.items() if value}
            reason = moving.reason
            self.fail(Reason(reason.code, reason.what, who, reason.cause, reason.hint))
        elif self.status is Status.TRANSFERRING and not moving.pending:
            if delivery is self._first:
                self._chunks += 1
            delivery.arrived += 1
            self.settled = min(each.arrived for each in self._deliveries.values())
            delivery.ended = pushed.push.last
            if not delivery.ended:
                self._ranks.send(delivery.chunk(pushed))
            elif not delivery.finished:
                self._finish(delivery, pushed)
            else:
                self._maybe_succeed()
        self._after_change()

    def _finish(self, delivery: OutgoingDelivery, pushed: PushResult) -> None:
        finished = delivery.finish(pushed)
        self._carriers[delivery.rank.name] = finished.transport
        self._ranks.send(finished)

    # What decode says.

    def received(self, delivery: OutgoingDelivery) -> None:
        """A destination has everything from every prefill rank."""
        if not delivery.finished:
            return
        delivery.received = True
        self._maybe_succeed()

    def _maybe_succeed(self) -> None:
        """Succeed, if every destination has everything, and this side has seen the end of each transfer."""
        for each in self._deliveries.values():
            if not each.received or not each.ended:
                return
        self.step(Status.SUCCEEDED)
        self.prove_quiesced()

    def note(self, delivery: OutgoingDelivery, component: str, payload: bytes) -> None:
        """Give a send hook the message of its counterpart."""
        delivery.note(component, payload, self.fail)

    def given_up(self, delivery: OutgoingDelivery, reason: Reason) -> None:
        """A destination has failed the room."""
        had_drained = delivery.drained
        self.fail(reason)  # this sends Drained once nothing is in flight to the destination
        if had_drained:
            self._ranks.send(delivery.say_drained())  # the first Drained may have been lost: repeat it

    def rank_lost(self, rank: DecodeRank, why: str) -> None:
        """A decode rank was lost: the room fails if it belongs to it, unless that rank has everything."""
        self.keepers -= {rank.name}
        delivery = self._deliveries.get(rank.name)
        if delivery is not None and not delivery.received:
            self.fail(self.reason_for("peer.lost", "decode was lost", why, peer=rank.name))

    def look_for_exits(self) -> None:
        """Look whether the processes of destinations have ended: then nothing is in flight to them any more."""
        exited = [each for each in self._deliveries.values() if each.in_flight.find_exit()]
        for delivery in exited:
            self._uses_in_flight.discard(delivery.use)
        if exited:
            self._after_change()

    # The end.

    def fail(self, reason: Reason) -> None:
        """See `RoomState.fail`. Sends Failed to every destination, and stops the transfers."""
        self.fail_known(reason, {}, 0)

    def fail_known(self, reason: Reason, informed: Mapping[str, str], ranks: int) -> None:
        """The same as `fail`, where some decode ranks know of the end already.

        Args:
            reason: Why the room fails.
            informed: Link names of the ranks that know, with their instances.
            ranks: How many ranks of their instance have to know.
        """
        ended = self._end_in_failure(reason)
        if ended is None:
            return
        self._budget.count(-len(self._queue))
        self._queue.clear()
        for delivery in self._deliveries.values():
            delivery.cancel()
            self._ranks.send(delivery.say_failed(ended))
        if not self._deliveries:
            self._requests.ended(self, ended, informed, ranks)
        self._after_change()

    def abort(self, why: str) -> None:
        """See `RoomState.abort`."""
        self.fail(self.reason_for("room.aborted", "prefill aborted the request", why))

    def abort_unclaimed(self, why: str) -> None:
        """See `Sending.abort_unclaimed`."""
        if not self.claimed:
            hint = "does each request reach decode, and soon? a router or decode's server may have dropped it"
            self.fail(self.reason_for("room.unclaimed", "prefill gave up a room that nobody asked for", why, hint))

    def expire(self) -> None:
        """See `RoomState.expire`."""
        cause, hint = f"it still waits for {self.waits_for()}", ""
        if self.status is Status.BOOTSTRAPPING:
            cause = self._requests.unasked(self)
            rendezvous = self.context.rendezvous
            # A decode rank that is connected has found this one: the directory is not why it did not ask.
            if not self._ranks.known and isinstance(rendezvous, Explaining):
                why, hint = rendezvous.explain(None)
                cause += f"; {why}" if why else ""
        elif self._pushes and not self._complete and not self._queue:
            hint = "a push with layers=, and one that ends before N, is not the last one, unless it says last=True"
        hooks = (
            (f"{key}: {name}", hook) for key, each in self._deliveries.items() for name, hook in each.hooks.items()
        )
        cause += hooks_wait_for(hooks)
        self.fail_late("room.deadline", "a room passed its deadline on prefill", cause, hint)

    def _after_change(self) -> None:
        """Send Drained to destinations of a failed room, once nothing is in flight to them, and update quiescence."""
        failed = self.status is Status.FAILED
        for delivery in self._deliveries.values():
            delivery.in_flight.look_after(partial(self._looked_after, delivery))
            if not failed:
                continue
            if not delivery.in_flight.on(Side.TARGET) and not delivery.drained:
                self._ranks.send(delivery.say_drained())
            if not delivery.in_flight.on(Side.SOURCE):
                delivery.tell_released()
        self.prove_quiesced()

    def _looked_after(self, delivery: OutgoingDelivery) -> None:
        """Transfers that a failed room left behind were polled. Control thread."""
        if delivery.in_flight.unproven:
            self._uses_in_flight.add(delivery.use)
        else:
            self._uses_in_flight.discard(delivery.use)
        self._after_change()

    def _untouched(self) -> bool:
        ended = self.status in ENDED
        unread = ended or bool(self._deliveries)
        for each in self._deliveries.values():
            if not (ended or each.finished) or each.in_flight.on(Side.SOURCE):
                unread = False
                break
        if ended and unread:
            self.settled = self._pushes  # before it is quiet: then a thread of the engine may name more in vain
        return not self._pushes or unread

    # Words.

    def peers(self) -> list[PeerInfo]:
        """See `RoomState.peers`."""
        return [delivery.rank.info for delivery in self.deliveries]

    def transports(self) -> dict[str, str]:
        """See `RoomState.transports`."""
        return {delivery.rank.name: delivery.rank.transport() for delivery in self.deliveries}

    def carried(self) -> list[tuple[str, str, int]]:
        """See `RoomState.carried`."""
        found = []
        for delivery in self._deliveries.values():
            carried = delivery.moved
            if carried:
                name = delivery.rank.name
                transport = self._carriers[name] if name in self._carriers else delivery.rank.transport()
                found += [(component, transport, moved.nbytes) for component, moved in carried.items()]
        return found

    def waits_for(self) -> str:
        """See `RoomState.waits_for`."""
        deliveries = self.deliveries
        if not deliveries:
            missing = self._requests.missing(self)
            if missing is None:
                connecting = self._requests.connecting(self)
                return f"the connection to {connecting}" if connecting else "decode's request"
            return f"the requests of {missing} more decode ranks" if missing else ""
        if self._queue:
            return "the engine's ready event"
        if not self._complete:
            named = {name for items in self._items for name in items}
            lacking = [each.name for each in self.context.inventory.components if each.name not in named]
            push = "the engine's last push" if self._pushes else "the engine's first push"
            return push + (f", with {', '.join(lacking)}" if lacking else "")
        return "; ".join(filter(None, (each.waits_for() for each in deliveries)))

    def refusal(self) -> str:
        """See `RoomState.refusal`."""
        return self._requests.refusal(self) if self.status is Status.BOOTSTRAPPING else ""

    def held(self) -> tuple[int, str]:
        """See `RoomState.held`."""
        named: dict[str, list[Items]] = {}
        for items in list(self._items):  # the control thread may be adding
            for name, piece in items.items():
                named.setdefault(name, []).append(piece)
        counts = {
            name: len(np.unique(np.concatenate([piece.ids for piece in pieces]))) for name, pieces in named.items()
        }
        nbytes = self.bytes_of(counts)
        for delivery in self.deliveries:
            why = delivery.in_flight.unsettled.get(Side.SOURCE)
            if why is not None:
                return nbytes, why
        return nbytes, "transfers are in flight"


class Standings:
    """What the other ranks have said of one room. The control thread changes it; any thread may read it.

    Args:
        count: How many other ranks there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._known: dict[str, Status] = {}

    def note(self, address: str, status: Status) -> None:
        """Note what a rank says. A room never goes back, so a message that came late changes nothing."""
        before = self._known.get(address, Status.BOOTSTRAPPING)
        if before not in ENDED and (status is Status.FAILED or status >= before):
            self._known[address] = status

    def least(self, here: Status) -> Status:
        """The least status of all ranks. ``here``: that of this rank. A rank that has not answered is BOOTSTRAPPING."""
        known = list(self._known.values())
        return min(here, *known, *([Status.BOOTSTRAPPING] if len(known) < self._count else []))

    def unsure(self, here: Status, addresses: Iterable[str]) -> list[str]:
        """The ranks on which the room may go on, as far as is known; none once it has failed on any rank."""
        if Status.FAILED in (here, *self._known.values()):
            return []
        return [address for address in addresses if self._known.get(address) is not Status.SUCCEEDED]


def _differing(prefill: bytes, decode: bytes) -> MismatchError:
    """The error for two contents that differ, of which one may be empty: its side states none."""
    if prefill and decode:
        return MismatchError(
            "the two sides hold different requests",
            cause=f"content {prefill.hex()} on prefill, {decode.hex()} on decode",
            hint="give both servers the same prompt, adapter, items and salt: look at the router, which may have mixed "
            "two requests up, and at tokenizers and chat templates",
            code="room.content",
        )
    said = f"{prefill.hex()} on prefill, none on decode" if prefill else f"none on prefill, {decode.hex()} on decode"
    return MismatchError(
        "one side alone states the content of the request",
        cause=f"content {said}",
        hint="pass content= to send() and to receive(), or to neither",
        code="room.content",
    )
