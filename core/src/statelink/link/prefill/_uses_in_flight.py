"""Uses of which writes may be in flight although their room is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._delivery import RequestId

__all__ = ["UsesInFlight"]


class UsesInFlight:
    """Uses of decode ranks to which transfers failed without being settled. Belongs to the control thread.

    A use stays here when its room is forgotten: as long as it is here, it must not be called drained. The set has no
    bound of its own. Each use in it keeps memory of its destination quarantined, so there cannot be many.
    """

    def __init__(self) -> None:
        self._uses: set[RequestId] = set()

    def __contains__(self, use: object) -> bool:
        return use in self._uses

    def add(self, use: RequestId) -> None:
        """Writes for a use may be in flight to its destination, and nobody knows when they end."""
        self._uses.add(use)

    def discard(self, use: RequestId) -> None:
        """No write for a use is in flight to its destination any more."""
        self._uses.discard(use)

    def destinations(self) -> set[str]:
        """Link names of the ranks to which such writes may be in flight."""
        return {name for name, _, _ in self._uses}
