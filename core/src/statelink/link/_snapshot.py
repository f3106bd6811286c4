"""What a link is doing, as plain values: for `Link.snapshot` and ``statelink inspect``. Bounded, and blocks nobody."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ._status import ENDED, Status

if TYPE_CHECKING:
    from statelink.state import Inventory

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
    ranks = node.role.ranks(now)
    busy = sorted((room for room in rooms if room.status not in ENDED or not room.quiesced), key=_age)
    return {
        "link": node.name,
        "address": str(node.channel.endpoint),
        "role": node.config.role,
        "backend": node.backend.name,
        "instance": node.inventory.instance,
        "rank": node.inventory.rank,
        "peers": node.role.snapshot(),
        "ranks": ranks[:MOST],
        "rooms": {status.name.lower(): sum(room.status is status for room in rooms) for status in Status},
        "oldest": [_room(room, now) for room in busy[:MOST]],
        "quarantined": sorted(room.room for room in rooms if room.status is Status.FAILED and not room.quiesced),
        "memory": _memory(node.inventory, rooms),
        "queues": {**node.depths(), "changes": len(node._changes)},
        "dropped_frames": dict(node.channel.dropped),
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


def _memory(inventory: Inventory, rooms: list[Room]) -> dict[str, Any]:
    """Bytes that rooms have named and that must not be reused, by how the rooms stand, or why they failed."""
    sizes: dict[tuple[str, tuple[int, int] | None], int] = {}
    held: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    for room in rooms:
        if room.quiesced:
            continue
        nbytes = 0
        for name, count, layers in room._named_items():
            if (name, layers) not in sizes:
                sizes[name, layers] = _item_nbytes(inventory, name, layers)
            nbytes += count * sizes[name, layers]
        if room.status is Status.FAILED:
            quarantined[room.reason.code if room.reason else "unknown"] += nbytes
        else:
            held[room.status.name.lower()] += nbytes
    return {
        "held_bytes": sum(held.values()),
        "held_by_status": dict(held),
        "quarantined_bytes": sum(quarantined.values()),
        "quarantined_by_reason": dict(quarantined),
    }


def _item_nbytes(inventory: Inventory, name: str, layers: tuple[int, int] | None) -> int:
    return sum(
        buffer.layout.nbytes
        for buffer in inventory.component(name).buffers
        if buffer.count and (layers is None or (buffer.layer is not None and layers[0] <= buffer.layer < layers[1]))
    )
