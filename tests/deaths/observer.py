"""An observer in a worker process: how often each room was reported to have ended."""

from __future__ import annotations

from collections import Counter

from statelink.backend import RoomReport, hookimpl
from statelink.registry import plugin_manager

__all__ = ["ends", "watch"]

_ends: Counter[tuple[int, str]] = Counter()


class Observer:
    """Counts."""

    @hookimpl
    def statelink_room_ended(self, report: RoomReport) -> None:
        _ends[report.room, report.status] += 1


def watch() -> None:
    """Begin."""
    _ends.clear()
    if not plugin_manager().has_plugin("deaths"):
        plugin_manager().register(Observer(), "deaths")


def ends() -> dict[tuple[int, str], int]:
    """Room and status to how often that was reported."""
    return dict(_ends)
