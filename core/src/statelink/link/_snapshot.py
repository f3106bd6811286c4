"""What a link is doing, as plain values: for `Link.snapshot` and ``statelink inspect``. Bounded, and blocks nobody."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ._status import ENDED, Status

if TYPE_CHECKING:
    from ._node import Node
    from ._room import Room

__all__ = ["MOST", "snapshot"]

MOST = 64
"""Most rooms, and most peers, that are listed one by one; the counts have all of them."""


def snapshot(node: Node) -> dict[str, Any]:
    """Peers, rooms, memory and queues of a link. Callable from any thread."""
    now = node.now()
    with node.lock:
        rooms = list(node.rooms.values())
    held, quarantined = _held(rooms)
    ranks = node.role.ranks(now)
    busy = sorted((room for room in rooms if room.status not in ENDED or not room.quiesced), key=_age)
    return {
        "link": node.name,
        "address": str(node.channel.endpoint),
        "role": node.config.role,
        "backend": node.backend.name,
        "rejected": dict(node.rejected),
        "require": list(node.config.require),
        "instance": node.inventory.instance,
        "rank": node.inventory.rank,
        "memory": {kind: dict(known) for kind, known in node.memory.items()},
        "peers": node.role.snapshot(),
        "ranks": ranks[:MOST],
        "rooms": {status.name.lower(): sum(room.status is status for room in rooms) for status in Status},
        "oldest": [_room(room, now) for room in busy[:MOST]],
        "quarantined": sorted(room.room for room in rooms if room.status is Status.FAILED and not room.quiesced),
        "quarantined_bytes": dict(quarantined),
        "held_bytes": dict(held),
        "strategies": {
            each.name: dict(numbers) for each in set(node.strategies.values()) if (numbers := each.snapshot())
        },
        "load": {**node.load(), **node.role.load()},
        "dropped_frames": dict(node.channel.dropped),
        "refused_keys": node.channel.refused,
    }


def _age(room: Room) -> float:
    return room._opened


def _room(room: Room, now: float) -> dict[str, Any]:
    return {
        "room": room.room,
        "status": room.status.name.lower(),
        "age": round(now - room._opened, 3),
        "waits_for": room._missing() if room.status not in ENDED else "proof that nobody writes to or reads its memory",
        "holds": not room.quiesced,
        "reason": "" if room.reason is None else room.reason.code,
    }


def _held(rooms: list[Room]) -> tuple[Counter[str], Counter[str]]:
    """Bytes that rooms have named and that must not be reused: by status, and of failed rooms by what they wait for."""
    held: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    for room in rooms:
        if not room.quiesced:
            nbytes, why = room._held()
            if room.status is Status.FAILED:
                quarantined[why] += nbytes
            else:
                held[room.status.name.lower()] += nbytes
    return held, quarantined
