"""What a driver says about an address, in the same form for every driver."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Location", "Origin", "Seen"]


class Location(enum.Enum):
    """Where memory is."""

    UNKNOWN = "memory that it does not know"
    HOST = "host memory"
    DEVICE = "memory of a device"
    MANAGED = "managed memory"  # the host and all devices may use it
    NOT_STARTED = "nothing, since it has not started in this process"


class Origin(enum.Enum):
    """How memory of a device was allocated, as far as it matters for registration."""

    PLAIN = "plain"
    VIRTUAL = "virtual"  # mapped piece by piece, as by torch's expandable segments
    POOL = "pool"  # from a stream-ordered pool
    UNKNOWN = "unknown"


class Seen(NamedTuple):
    """What a driver says about one address.

    Attributes:
        location: The kind of memory.
        device: Number of its device in this process, for device memory.
        end: First byte after the allocation, or after the piece of it that was mapped at once; 0 if unknown.
        origin: How the memory was allocated.
        direct: Whether a network card can reach it; ``None`` if unknown.
    """

    location: Location
    device: int = -1
    end: int = 0
    origin: Origin = Origin.UNKNOWN
    direct: bool | None = None

    def __str__(self) -> str:
        return f"memory of device {self.device}" if self.location is Location.DEVICE else self.location.value
