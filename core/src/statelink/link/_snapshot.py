"""What a link is doing, as plain values: for `Link.snapshot` and ``statelink inspect``. Bounded; never blocks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ._diagnostics import seconds_since
from ._status import ENDED, Status

if TYPE_CHECKING:
    from statelink.backend import Strategy

    from ._context import Context
    from ._control import Control, Role
    from ._room_state import RoomState
    from ._room_table import RoomTable

__all__ = ["MOST_LISTED", "snapshot"]

MOST_LISTED = 64
"""Most rooms, and most ranks, that are listed one by one; the counts have all of them."""

NOT_QUIESCED = "proof that nothing writes to or reads its memory"


def snapshot(context: Context, table: RoomTable, control: Control) -> dict[str, Any]:
    """Peers, rooms, memory and queues of a link. Callable from any thread."""
    now = context.now()
    rooms = [state for state, _ in table.all()]
    held, quarantined = _held(rooms)
    ranks = [rank for role in control.roles for rank in role.ranks(now)]
    load = {name: count for role in control.roles for name, count in role.load().items()}
    busy = sorted((room for room in rooms if not room.over), key=lambda room: room.opened)
    return {
        "link": context.name,
        "address": str(context.channel.endpoint),
        "role": context.config.role,
        "backend": context.backend.name,
        "suspended": table.is_shut,
        "rejected": dict(context.rejected),
        "require": list(context.config.require),
        "instance": context.inventory.instance,
        "rank": context.inventory.rank,
        "memory": {kind: dict(known) for kind, known in context.memory.items()},
        "peers": _peers(control.roles),
        "ranks": ranks[:MOST_LISTED],
        "rooms": {status.name.lower(): sum(room.status is status for room in rooms) for status in Status},
        "oldest": [_room(room, now) for room in busy[:MOST_LISTED]],
        "quarantined": sorted(room.room for room in rooms if room.status is Status.FAILED and not room.memory.quiesced),
        "taken_back": [room.room for room in table.unproven()[-MOST_LISTED:]],
        "quarantined_bytes": dict(quarantined),
        "held_bytes": dict(held),
        "strategies": _strategies(context.strategies.values()),
        "switch_interval": sys.getswitchinterval(),
        "totals": table.totals(),
        "load": {**table.load(), **context.workers.waiting(), **load},
        "dropped_frames": dict(context.channel.dropped),
        "refused_keys": context.channel.refused,
    }


def _peers(roles: Iterable[Role]) -> dict[str, str]:
    """The state of each peer. One that a link of both roles knows in both has both states, under its link name."""
    found: dict[str, str] = {}
    for role in roles:
        for name, (state, ranks) in role.snapshot().items():
            known = bool(ranks) and all(rank in found for rank in ranks)
            for each in ranks if known else [name]:
                found[each] = f"{found[each]}, {state}" if each in found else state
    return found


def _strategies(strategies: Iterable[Strategy]) -> dict[str, dict[str, int]]:
    """The numbers of strategies, by name. Those of strategies that have one name are added up."""
    found: dict[str, dict[str, int]] = {}
    # By identity, because equal strategies may be different objects.
    for strategy in {id(each): each for each in strategies}.values():
        for what, number in strategy.snapshot().items():
            numbers = found.setdefault(strategy.name, {})
            numbers[what] = numbers.get(what, 0) + number
    return found


def _room(room: RoomState, now: float) -> dict[str, Any]:
    return {
        "room": room.room,
        "role": room.role,
        "status": room.status.name.lower(),
        "age": seconds_since(room.opened, now),
        "waits_for": room.waits_for() if room.status not in ENDED else NOT_QUIESCED,
        "holds": not room.memory.quiesced,
        "reason": "" if room.reason is None else room.reason.code,
    }


def _held(rooms: list[RoomState]) -> tuple[Counter[str], Counter[str]]:
    """Bytes of rooms that are not quiesced, by status. Then those of failed rooms, by what they wait for."""
    held: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    for room in rooms:
        if not room.memory.quiesced:
            nbytes, why = room.held()
            if room.status is Status.FAILED:
                quarantined[why] += nbytes
            else:
                held[room.status.name.lower()] += nbytes
    return held, quarantined
