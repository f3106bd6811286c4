"""The decode role: it finds the room that a message is about, and calls it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from statelink import wire
from statelink.errors import RoomError
from statelink.link._room_state import room_reason
from statelink.link._room_table import Rooms
from statelink.plan import needs_tokens, unknown_pages

from ._in_flight import ProcessExits, Proof
from ._instances import Instances
from ._postponed import Declines, Leases
from ._receiving import Receiving
from ._receiving_state import AboutRoom, ReceivingState
from ._unmet import UnmetUses

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.link._ready import Ready
    from statelink.link._room_table import RoomTable
    from statelink.link.peers import Peer

    from ._instance import PrefillRank
    from ._receiving import Accepted

__all__ = ["DecodeRole"]

GENERATION_BYTES = 8
"""Bytes that are drawn for each generation."""
GENERATION_BITS = 62
"""Bits of these that a generation has."""
GENERATIONS_AT_ONCE = 64
ABOUT_ROOM = (wire.Chunk, wire.Finished, wire.Failed, wire.Drained, wire.Note)


class DecodeRole:
    """Decode's half of the protocol. Belongs to the control thread, except where a method says otherwise.

    Args:
        context: The link's parts.
        table: The rooms of the link.
    """

    def __init__(self, context: Context, table: RoomTable) -> None:
        self._context = context
        self._table = table
        self._rooms = Rooms(table, ReceivingState)
        self._instances = Instances(context)
        self._unmet = UnmetUses(context.now)
        self._generations: deque[int] = deque()
        """Numbers that are drawn for uses of ids to come."""
        self._declines = Declines(context, self._unmet)
        self._leases = Leases(context)
        self._exits = ProcessExits(context.loop, context.workers, context.backend.capabilities, self._drained)

    def receive(
        self,
        room: int,
        peer: Peer,
        tokens: int | None,
        items: Mapping[str, Any] | None,
        prefix: int,
        ready: Ready | None,
        deadline: float | None,
        content: bytes,
    ) -> Receiving:
        """Open a room. A thread of the engine.

        Raises:
            RoomError: The id is in use, too many rooms are open, or the items are not what must arrive, or not known
                without the number of tokens.
        """
        if tokens is None:
            self._check_unknown(room)
        state = ReceivingState(
            self._context,
            self._table,
            self._unmet,
            self._declines,
            self._instances.explain,
            room=room,
            tokens=tokens,
            generation=self._draw_generation(),
            deadline=deadline,
        )
        state.content = content
        receiving = Receiving(state)
        # Items are checked before the room is entered, so that refused ones leave no trace of it.
        accepted = None if items is None else receiving._check_accept(items, prefix, ready)  # noqa: SLF001 - its own
        self._table.enter(state, receiving)
        self._context.post_job(self._open, state, peer, accepted)
        return receiving

    def _open(self, room: ReceivingState, peer: Peer, accepted: Accepted | None) -> None:
        self._table.watch(room)
        if accepted is not None:
            room.accepted(accepted)
        room.open(self._instances.get(peer))

    def _draw_generation(self) -> int:
        """A number above zero for a use of an id, which no peer can foresee: 62 random bits, plus one. Any thread.

        It asks the system for many at once. Each such call lets go of the interpreter, and the engine's thread, which
        opens rooms, may wait long to get it back.
        """
        while True:
            try:
                return self._generations.popleft()
            except IndexError:
                drawn = secrets.token_bytes(GENERATION_BYTES * GENERATIONS_AT_ONCE)
            each = (drawn[at : at + GENERATION_BYTES] for at in range(0, len(drawn), GENERATION_BYTES))
            unused = 8 * GENERATION_BYTES - GENERATION_BITS
            self._generations.extend((int.from_bytes(number, "little") >> unused) + 1 for number in each)

    def _check_unknown(self, room: int) -> None:
        """Check that a request whose number of tokens only prefill knows can be received."""
        components = self._context.inventory.components
        if any(each.page == 1 and not needs_tokens(each) for each in components):
            return
        for component in components:
            if needs_tokens(component):
                error = unknown_pages(component).reason
                reason = room_reason(self._context, room, error.code, error.what, error.cause, error.hint)
                raise RoomError.of(reason)

    def decline(self, room: int, peer: Peer, why: str) -> None:
        """See `Link.decline`. A thread of the engine.

        Raises:
            RoomError: This side has opened a room with this id.
        """
        self._check_unopened(room, "declined", "abort it")
        reason = room_reason(self._context, room, "room.declined", "decode declined the request", why)
        self._context.post_job(self._decline, room, peer, reason)

    def _decline(self, room: int, peer: Peer, reason: Reason) -> None:
        until = self._context.now() + self._context.config.deadline
        generation = self._draw_generation()
        self._declines.add(room, generation, self._instances.get(peer), reason, until)

    def keep(self, room: int, peer: Peer, seconds: float) -> None:
        """See `Link.keep`. A thread of the engine.

        Raises:
            RoomError: This side has opened a room with this id.
        """
        self._check_unopened(room, "kept", "extend it")
        until = self._context.now() + seconds
        self._context.post_job(lambda: self._leases.add(room, self._instances.get(peer), until))

    def _check_unopened(self, room: int, what: str, hint: str) -> None:
        known = self._rooms.get(room)
        if known is not None and not known.over:
            raise RoomError(
                f"room {room} cannot be {what}",
                cause=f"this side opened it, and it is {known.status.name.lower()}",
                hint=hint,
                code="room.in_use",
                backend=self._context.backend.name,
                link=self._context.name,
            )

    def set_siblings(self, siblings: list[str]) -> None:
        """See `Link.siblings`. Any thread."""
        self._context.post_job(self._instances.set_siblings, siblings)

    # Messages.

    def handle(self, message: wire.Message, address: str) -> None:
        """A message from a link that this one dialled, at ``address``."""
        if isinstance(message, wire.Unknown):
            for rank in self._instances.at(address) if message.room else ():
                room = self._room(message.room, message.generation)
                if room is not None:
                    room.drained(rank.name, Proof.UNKNOWN)
        speakers = self._instances.speakers(message, address)
        if isinstance(message, ABOUT_ROOM):
            for rank in speakers:
                self._about_room(message, rank)
            return
        for rank in speakers:
            if isinstance(message, wire.Bye) and message.drained and rank.may_leave(message):
                self._drained(rank, Proof.DRAINED)
        self._instances.handle(message, address)

    def handle_sibling(self, message: wire.Message) -> None:
        """A message from a link that dialled this one: another rank of this instance, which asks for the inventory."""
        if isinstance(message, wire.Hello):
            self._instances.answer_sibling(message)

    def _about_room(self, message: AboutRoom, rank: PrefillRank) -> None:
        if isinstance(message, (wire.Failed, wire.Drained)) and message.met:
            self._unmet.met(message.room, message.met, rank.name)
        room = self._room(message.room, message.generation)
        if room is not None:
            room.handle(message, rank.name)

    def _room(self, number: int, generation: int) -> ReceivingState | None:
        current = self._rooms.get(number)
        if current is not None and current.generation == generation:
            return current
        return next((room for room in self._rooms.with_id(number) if room.generation == generation), None)

    def _drained(self, rank: PrefillRank, proof: Proof) -> None:
        """No write of a rank can land any more, for whatever room."""
        for room in self._rooms.all():
            room.drained(rank.name, proof)

    # Time and the end.

    def beat(self, now: float, late: float) -> None:
        """See `Role.beat`."""
        self._instances.beat(now, late)
        self._declines.beat(now)
        self._leases.beat(now)
        undrained = [rank for room in self._rooms.unproven() for rank in room.undrained()]
        self._exits.look({rank.name: rank for rank in undrained}.values())

    def busy(self) -> bool:
        """See `Role.busy`."""
        return bool(self._rooms.unproven())

    def suspend(self) -> None:
        """See `Role.suspend`."""
        self._instances.suspend()

    def resume(self) -> None:
        """See `Role.resume`."""
        self._instances.resume()

    def close(self) -> None:
        """See `Role.close`."""
        self._instances.close()

    # What is seen from outside. Any thread.

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """See `Role.ranks`."""
        return self._instances.ranks(now)

    def snapshot(self) -> dict[str, tuple[str, list[str]]]:
        """See `Role.snapshot`."""
        return self._instances.snapshot()

    def load(self) -> dict[str, int]:
        """See `Role.load`."""
        return {"unmet": len(self._unmet)}
