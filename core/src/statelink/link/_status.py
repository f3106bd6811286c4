"""The statuses of a room, and which status may follow which."""

from __future__ import annotations

import enum

__all__ = ["ENDED", "FOLLOWS", "Status"]


class Status(enum.IntEnum):
    """How far a room is on one side. The values are in order: an engine may take the minimum over its ranks."""

    FAILED = 0
    """Ended, with a reason."""
    BOOTSTRAPPING = 1
    """The other side is not known yet, or has sent nothing about this room yet."""
    WAITING = 2
    """Both sides know of the room; nothing has moved."""
    TRANSFERRING = 3
    """Bytes are moving."""
    SUCCEEDED = 4
    """Ended: every promised byte is visible at the destination."""

    def __str__(self) -> str:
        """The status in lower case, as in snapshots and reasons, on every version of Python."""
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        """As `str` does."""
        return format(str(self), spec)


ENDED = frozenset({Status.FAILED, Status.SUCCEEDED})

FOLLOWS = {
    Status.BOOTSTRAPPING: {Status.WAITING, Status.FAILED},
    # A rank that is assigned nothing of a request ends without having moved a byte.
    Status.WAITING: {Status.TRANSFERRING, Status.SUCCEEDED, Status.FAILED},
    Status.TRANSFERRING: {Status.SUCCEEDED, Status.FAILED},
    Status.SUCCEEDED: set(),
    Status.FAILED: set(),
}
"""For each status, those to which a room may go on from it. It never goes back, and an ended room keeps its status."""
