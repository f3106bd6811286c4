"""The prefill role: it finds the room that a message is about, and calls it."""

from __future__ import annotations

import contextlib
from queue import Empty
from typing import TYPE_CHECKING, Any

from statelink import wire
from statelink._logs import logger
from statelink.backend import Side
from statelink.link._room_table import Rooms

from ._decode_ranks import DecodeRanks
from ._in_flight import UsesInFlight
from ._requests import Requests
from ._sending import PushBudget, Sending
from ._sending_state import SendingState
from ._siblings import Siblings

if TYPE_CHECKING:
    from statelink.link._context import Context
    from statelink.link._room_table import RoomTable

    from ._decode_ranks import DecodeRank
    from ._outgoing import OutgoingDelivery
    from ._requests import Wanted

__all__ = ["PrefillRole"]

log = logger("statelink.link")

MOST_WANTED = 1024
"""Most rooms that one call names."""

AboutDelivery = wire.Received | wire.Failed | wire.Note


class PrefillRole:
    """Prefill's half of the protocol. Belongs to the control thread, except where a method says otherwise.

    Args:
        context: The link's parts.
        table: The rooms of the link.
    """

    def __init__(self, context: Context, table: RoomTable) -> None:
        self._context = context
        self._table = table
        self._rooms = Rooms(table, SendingState)
        self._ranks = DecodeRanks(context, self._lost, lambda rank: self._requests.settled(rank))
        self._uses_in_flight = UsesInFlight()
        self._siblings = Siblings(context, self._rooms)
        self._requests = Requests(context, self._ranks, self._rooms, self._uses_in_flight)
        self._budget = PushBudget(context.config.max_pushes)
        self._soon = 2 * context.config.heartbeat
        """Seconds within which a heartbeat wakes the control thread in any case."""

    def send(self, room: int, tokens: int | None, deadline: float | None, content: bytes) -> Sending:
        """Open a room. A thread of the engine.

        Raises:
            RoomError: The id is in use, or too many rooms are open.
        """
        state = SendingState(
            self._context,
            self._table,
            self._budget,
            self._ranks,
            self._requests,
            self._uses_in_flight,
            self._siblings,
            room=room,
            tokens=tokens,
            deadline=deadline,
        )
        state.content = content
        sending = Sending(state, self._budget)
        self._table.enter(state, sending)
        loop = self._context.loop
        loop.post_quietly(lambda: self._open(state))
        # In most cases decode has not asked yet, and there is nothing to do. Its request then finds the room in the
        # table. From the next heartbeat on, the deadline is watched.
        if state.deadline - state.opened < self._soon or self._requests.wait_for(state):
            loop.wake()
        return sending

    def wanted(self, timeout: float) -> list[Wanted]:
        """See `Link.wanted`. A thread of the engine, which waits."""
        requests = self._requests
        found: list[Wanted] = []
        if not requests.wants:
            self._context.post_job(requests.want)
        with contextlib.suppress(Empty):
            found.append(requests.wanted.get(timeout > 0, timeout))
            while len(found) < MOST_WANTED:
                found.append(requests.wanted.get_nowait())
        return found

    def _open(self, room: SendingState) -> None:
        self._table.watch(room)
        self._siblings.opened(room)
        self._requests.open(room)

    def set_siblings(self, siblings: list[str]) -> None:
        """See `Link.siblings`. Any thread."""
        self._siblings.name(siblings)

    # Messages.

    def handle(self, message: wire.Message) -> None:
        """A message from a link that dialled this one."""
        if type(message) is wire.Inquire:
            self._siblings.inquired(message)
            return
        rank = self._ranks.speaker(message)
        if type(message) is wire.Hello:
            self._ranks.hello(message)
        elif rank is None:
            self._answer_unknown(message)
        elif type(message) is wire.Request:
            self._requests.request(message, rank)
        elif type(message) is wire.Received:
            room, delivery = self._find(message, rank)
            if room is not None and delivery is not None:
                room.received(delivery)
        elif isinstance(message, wire.Keep):
            self._requests.keep(message, rank)
        elif isinstance(message, wire.Failed):
            self._failed(message, rank)
        elif isinstance(message, wire.Note):
            room, delivery = self._find(message, rank)
            if room is not None and delivery is not None:
                room.note(delivery, message.component, message.payload)
        else:
            self._ranks.handle(message, rank)

    def handle_sibling(self, message: wire.Standing, address: str) -> None:
        """A message from another rank of this instance, which this link dialled at ``address``."""
        self._siblings.answered(message, address)

    def _answer_unknown(self, message: wire.Message) -> None:
        """Answer a message that is not from a known rank to this process: its sender begins with a new handshake.

        The message was meant for an earlier process at this address, or its sender was lost here.
        """
        if isinstance(message, (wire.Bye, wire.Unknown)):
            return
        room, generation = 0, 0
        if isinstance(message, wire.Request) and self._requests.declines(message):
            room, generation = message.room, message.generation
        name = self._context.name
        self._context.channel.send(wire.Unknown(sender=name, to=message.sender, room=room, generation=generation))

    def _failed(self, message: wire.Failed, rank: DecodeRank) -> None:
        room, delivery = self._find(message, rank)
        if room is not None and delivery is not None:
            room.given_up(delivery, message.reason)
            return
        self._requests.gave_up(message, rank)
        drained = self._requests.drained(message, rank)
        if drained is not None:
            self._ranks.send(drained)

    def _find(self, message: AboutDelivery, rank: DecodeRank) -> tuple[SendingState | None, OutgoingDelivery | None]:
        for room in self._rooms.with_id(message.room):
            delivery = room.delivery_to(rank.name)
            if delivery is not None and delivery.request.generation == message.generation:
                return room, delivery
        return None, None

    def _lost(self, rank: DecodeRank, why: str) -> None:
        self._requests.lost(rank)
        for room in self._rooms.all():
            room.rank_lost(rank, why)

    # Time and the end.

    def beat(self, now: float, late: float) -> None:
        """See `Role.beat`."""
        self._ranks.beat(now, late)
        self._siblings.beat()
        for room in self._rooms.unproven():
            room.look_for_exits()

    def busy(self) -> bool:
        """See `Role.busy`."""
        return bool(self._rooms.unproven())

    def suspend(self) -> None:
        """See `Role.suspend`."""
        self._ranks.suspend(self._destinations())

    def resume(self) -> None:
        """See `Role.resume`."""
        self._ranks.resume()

    def close(self) -> None:
        """See `Role.close`."""
        self._ranks.close(self._destinations())

    def _destinations(self) -> set[str]:
        """Link names of the decode ranks to which a write may be in flight."""
        deliveries = (each for room in self._rooms.all() for each in room.deliveries)
        in_flight = {each.rank.name for each in deliveries if each.in_flight.on(Side.TARGET)}
        return in_flight | self._uses_in_flight.destinations()

    def knows(self, name: str) -> bool:
        """Whether a peer that dialled this link, by its link name, has introduced itself."""
        return self._ranks.knows(name)

    # What is seen from outside. Any thread.

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """See `Role.ranks`."""
        return self._ranks.ranks(now)

    def snapshot(self) -> dict[str, tuple[str, list[str]]]:
        """See `Role.snapshot`."""
        return self._ranks.snapshot()

    def load(self) -> dict[str, int]:
        """See `Role.load`."""
        return {"pushes": self._budget.pushes, **self._requests.load()}
