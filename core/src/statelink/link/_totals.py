"""Counts how the rooms of a link ended, since the link was opened."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

from ._status import Status

if TYPE_CHECKING:
    from ._room_state import RoomState

__all__ = ["BOUNDS", "Totals"]

BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the buckets of a histogram, in seconds. A last bucket has what took longer."""

MOST, OTHER = 256, "other"
"""Most outcomes, and most components and transports, that are counted apart; and the name under which others count."""


class Histogram:
    """How many durations fall into each bucket, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


def _count(counter: Counter[tuple[str, ...]], key: tuple[str, ...], count: int) -> None:
    """Add to a counter. Of more keys than `MOST`, the last word becomes `OTHER`: peers choose some of these words."""
    if key not in counter and len(counter) >= MOST:
        key = (*key[:-1], OTHER)
    counter[key] += count


class Totals:
    """Rooms by outcome, bytes by component and transport, latencies, and memory that was taken back without proof.

    Written by the control thread, read by any.

    Every number only grows. A reader may see a room in one of them and not yet in another.
    """

    def __init__(self) -> None:
        self._rooms: Counter[tuple[str, ...]] = Counter()
        self._nbytes: Counter[tuple[str, ...]] = Counter()
        self._taken_back: Counter[tuple[str, ...]] = Counter()
        self._seconds: dict[str, tuple[Histogram, Histogram]] = {}
        """By role: how long rooms waited, and how long they took from then on."""

    def add(self, room: RoomState) -> None:
        """Count a room that has just ended. Control thread."""
        reason, role, counted = room.reason, room.role, self._nbytes
        _count(self._rooms, (role, "succeeded" if reason is None else reason.code), 1)
        for component, transport, nbytes in room.carried():
            key = role, component, transport
            if key in counted:
                counted[key] += nbytes
            else:
                _count(counted, key, nbytes)
        if room.status is Status.SUCCEEDED:
            if role not in self._seconds:
                self._seconds[role] = Histogram(), Histogram()
            for histogram, seconds in zip(self._seconds[role], room.durations(), strict=True):
                histogram.add(seconds)

    def taken_back(self, room: RoomState, by: str) -> None:
        """Count a room whose memory was taken back without proof. Control thread."""
        _count(self._taken_back, (room.role, by), 1)

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain values, by role. Any thread."""
        found: dict[str, Any] = {"rooms": {}, "bytes": {}, "taken_back": {}, "seconds": {}, "bounds": list(BOUNDS)}
        for (role, outcome), count in self._rooms.copy().items():
            found["rooms"].setdefault(role, {})[outcome] = count
        for (role, by), count in self._taken_back.copy().items():
            found["taken_back"].setdefault(role, {})[by] = count
        for (role, component, transport), nbytes in self._nbytes.copy().items():
            found["bytes"].setdefault(role, {}).setdefault(component, {})[transport] = nbytes
        for role, histograms in self._seconds.copy().items():
            found["seconds"][role] = {
                stage: {"counts": list(histogram.counts), "sum": histogram.sum}
                for stage, histogram in zip(("waited", "transferred"), histograms, strict=True)
            }
        return found
