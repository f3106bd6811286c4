"""The rooms under which a worker offers the state of one request: one for each of the lengths that its answer names.

The other server takes one of them. All read the same blocks, so the request's blocks are held until nothing reads them
for any room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink import Status

if TYPE_CHECKING:
    from statelink import Sending

__all__ = ["ENDED", "Offer"]

NOBODY = ("room.deadline", "room.unclaimed", "room.declined")
"""The codes with which a room ends that nobody has asked for."""
ENDED = (Status.SUCCEEDED, Status.FAILED)


class Offer:
    """The rooms of one request. Runs on a worker's main thread.

    Attributes:
        rooms: They, the one that the answer names first at the front.
        held: Whether they are for a turn of a conversation that may never come.
    """

    def __init__(self, *, held: bool) -> None:
        self.rooms: list[Sending] = []
        self.held = held

    @property
    def over(self) -> bool:
        """Whether all have ended, and nothing reads the blocks. When one has ended, the others are given up."""
        ended = [room for room in self.rooms if room.status in ENDED]
        if ended and len(ended) < len(self.rooms):
            self.abort_unclaimed("the other server has taken another length of it, or none")
        return len(ended) == len(self.rooms) and all(room.quiesced for room in self.rooms)

    @property
    def claimed(self) -> bool:
        """Whether the other server has said a word of it."""
        return any(room.claimed for room in self.rooms)

    def abort_unclaimed(self, why: str) -> None:
        """Give up the rooms of which the other server has not said a word."""
        for room in self.rooms:
            if room.status not in ENDED:
                room.abort_unclaimed(why)

    def extend(self, seconds: float) -> None:
        """Hold it for so long from now, or no longer, if that is 0. Does nothing if it is claimed."""
        if seconds:
            for room in self.rooms:
                room.extend(seconds)
        else:
            self.abort_unclaimed("a router let it go")

    @property
    def unwanted(self) -> bool:
        """Whether it was held, is over, and nobody has asked for it: the conversation did not go on here."""
        reason = self.taken.reason
        return self.held and reason is not None and reason.code in NOBODY

    @property
    def taken(self) -> Sending:
        """Of rooms that are over, the one that says how it went: that which was taken, or the first."""
        return next((room for room in self.rooms if room.status is Status.SUCCEEDED), self.rooms[0])
