"""What a driver says of an address, whichever driver it is."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Location", "Origin", "Seen"]


class Location(enum.Enum):
    """Where memory is."""

    UNKNOWN = "memory that it does not know"
    HOST = "host memory"
    DEVICE = "memory of a device"
    MANAGED = "managed memory"  # the host and devices may all use it


class Origin(enum.Enum):
    """How memory of a device was allocated, as far as it matters to those who register it."""

    PLAIN = "plain"
    VIRTUAL = "virtual"  # mapped piece by piece, as torch's expandable segments are
    POOL = "pool"  # of a stream-ordered pool
    UNKNOWN = "unknown"


class Seen(NamedTuple):
    """One address.

    Attributes:
        location: Where it is.
        device: Number of its device in this process; only of memory of a device.
        end: First byte after the allocation, or after the piece of it that was mapped at once; 0 where unknown.
        origin: How it was allocated.
        direct: Whether a network card can reach it; ``None`` where unknown.
    """

    location: Location
    device: int = -1
    end: int = 0
    origin: Origin = Origin.UNKNOWN
    direct: bool | None = None

    def __str__(self) -> str:
        return f"memory of device {self.device}" if self.location is Location.DEVICE else self.location.value
