"""Finds out which instance a room of prefill belongs to, and whether a request may mean another use of its id."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ._tombstones import AskingRank

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.wire import Channel, Request

    from ._decode_ranks import DecodeRank, DecodeRanks
    from ._pending import Asked, PendingRequests
    from ._sending_state import SendingState
    from ._tombstones import GivenUp, Tombstones

__all__ = ["Claims", "Group", "Stale"]

MOST_NAMED_CLAIMS = 4
"""Most rooms, and most ranks, that the cause of a passed deadline names."""


class Stale(NamedTuple):
    """A request and a room that may belong to different uses of the id.

    Attributes:
        ours: True if the request may mean an earlier room of this side. False if the room may belong to an earlier use
            of the decode rank.
        met: The generation to which the answer assigns a room of this side: that of the request, or of the earlier use.
    """

    ours: bool
    met: int


class Group(NamedTuple):
    """The ranks of one decode instance, each of which has asked for a room or given it up.

    Attributes:
        asked: The ranks that asked, with their requests.
        given_up: What is kept of the ranks that gave the room up; ``None`` if all asked.
    """

    asked: list[tuple[DecodeRank, Asked]]
    given_up: GivenUp | None


class Claims:
    """Compares rooms with pending requests and tombstones. It sends no message. Belongs to the control thread.

    Args:
        now: The link's clock.
        channel: The sockets, which know the keys of ranks.
        ranks: The decode ranks that are known.
        pending: Their pending requests.
        tombstones: What is remembered of rooms that are over.
    """

    def __init__(
        self,
        now: Callable[[], float],
        channel: Channel,
        ranks: DecodeRanks,
        pending: PendingRequests,
        tombstones: Tombstones,
    ) -> None:
        self._now = now
        self._channel = channel
        self._ranks = ranks
        self._pending = pending
        self._tombstones = tombstones

    def complete(self, room: SendingState) -> Group | None:
        """The first instance of which every rank has asked or given up, and at least one has asked."""
        if not self._pending.asked_for(room.room):
            return None
        groups: list[dict[int, tuple[DecodeRank, Asked]]] = []
        for rank, asked in self.asked(room.room):
            ours = rank.handshake.inventory
            for group in groups:
                one = next(iter(group.values()))[0]
                if one.handshake.inventory.instance == ours.instance and ours.rank not in group:
                    break
            else:  # the first of its instance; or a second link that claims a rank which the group has already
                group = {}
                groups.append(group)
            group[ours.rank] = rank, asked
            given_up = self._tombstones.given_up(room.room, ours.instance)
            members = list(group.values())
            others = 0
            if given_up is not None:
                others = len(given_up.uses.keys() - {each.name for each, _ in members})
            if len(members) + others >= max([each.expected for each, _ in members]):
                return Group(members, given_up if others and len(members) < rank.expected else None)
        return None

    def sole(self, request: Request, rank: DecodeRank) -> bool:
        """Whether a request alone decides about an open room that belongs to no instance.

        So it is if its instance sends no other request for the room, if no other rank's waits for it, and if nothing is
        remembered of an earlier use of the id which one of the two may mean. Then `complete` would find the rank alone,
        and `stale` nothing.
        """
        return (
            rank.expected == 1
            and not request.unmet
            and not self._pending.asked_for(request.room)
            and self._tombstones.blank(request.room)
        )

    def stale(self, room: SendingState, rank: DecodeRank, asked: Asked) -> Stale | None:
        """Whether a request and a room may belong to different uses; ``None`` if not.

        A tombstone that the request may mean counts as known to the rank after this call.
        """
        if not asked.request.unmet and self._tombstones.blank(room.room):
            return None
        asking = self.asking(rank)
        lasts = asked.request.lifetime_ms / 1000 + self._now() - asked.at
        end = self._tombstones.due(room.room, asking, lasts)
        if end is not None:
            self._tombstones.acknowledge(room.room, asking, end)
        if end is not None or self._tombstones.forgot(room.room):
            return Stale(ours=True, met=asked.request.generation)
        unmet = self._unmet(room, rank, asked)
        return None if unmet is None else Stale(ours=False, met=unmet)

    def _unmet(self, room: SendingState, rank: DecodeRank, asked: Asked) -> int | None:
        """The generation of the rank's earliest use that ended, and to which this room may belong; ``None`` if none."""
        for earlier in asked.request.unmet:
            ended = asked.at - earlier.ended_ms_ago / 1000
            met = earlier.generation and self._tombstones.met((rank.name, room.room, earlier.generation))
            if not met and room.opened < ended + self._tombstones.lifetime:
                return earlier.generation
        return None

    def taken(self, room: SendingState) -> Reason:
        """Why a rank cannot have a room that another instance has."""
        first = room.deliveries[0].rank
        cause = f"it belongs to {first.handshake.inventory.instance}, of which every rank had asked for it before"
        return room.reason_for("room.instances", "two decode instances ask for one room", cause)

    def missing(self, room: SendingState) -> int | None:
        """How many ranks have yet to ask, of the instance that lacks fewest; ``None`` if no rank asked. Any thread."""
        lacking: dict[str, int] = {}
        for name in list(self._pending.of(room.room)):
            rank = self._ranks.get(name)
            if rank is not None:
                instance = rank.handshake.inventory.instance
                lacking[instance] = lacking.get(instance, rank.expected) - 1
        return min(lacking.values(), default=None)

    def unasked(self, room: SendingState) -> str:
        """Why no instance has the room, for the cause of a passed deadline."""
        waiting = self.asked(room.room)
        if waiting:
            names = ", ".join(rank.name for rank, _ in waiting[:MOST_NAMED_CLAIMS])
            return f"{len(waiting)} decode ranks have asked for it ({names}), which are not all of their instance"
        others = self._pending.rooms(MOST_NAMED_CLAIMS)
        waits = f"requests for other rooms wait here: {', '.join(others)}" if others else ""
        return "; ".join(filter(None, ("decode never asked for it", waits, self.refusal(room))))

    def refusal(self, room: SendingState) -> str:
        """The last peer that did not fit, if that may be why nobody asked for a room; empty for none. Any thread."""
        refusal = self._ranks.refusal
        if refusal is None or refusal.at <= room.opened - self._tombstones.lifetime:
            return ""
        ago = self._now() - refusal.at
        return f"{ago:.1f} s ago, {refusal.peer} and this link did not agree ({refusal.reason.clause})"

    def asked(self, room: int) -> list[tuple[DecodeRank, Asked]]:
        """The ranks that asked for a room, with their requests."""
        found = ((self._ranks.get(name), asked) for name, asked in self._pending.of(room).items())
        return [(rank, asked) for rank, asked in found if rank is not None]

    def asking(self, rank: DecodeRank) -> AskingRank:
        """A rank as tombstones see it."""
        return AskingRank(rank.name, rank.handshake.inventory.instance, self._channel.key_of(rank.name), rank.expected)
