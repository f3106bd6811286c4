"""How a room stands on the other ranks of this link's own instance."""

from __future__ import annotations

from collections.abc import Iterable

from statelink.link._status import ENDED, Status

__all__ = ["Standings"]


class Standings:
    """What the other ranks have said of one room. The control thread changes it; any thread may read it.

    Args:
        count: How many other ranks there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._known: dict[str, Status] = {}

    def note(self, address: str, status: Status) -> None:
        """Note what a rank says. A room never goes back, so a message that came late changes nothing."""
        before = self._known.get(address, Status.BOOTSTRAPPING)
        if before not in ENDED and (status is Status.FAILED or status >= before):
            self._known[address] = status

    def least(self, here: Status) -> Status:
        """The least status of all ranks. ``here``: that of this rank. A rank that has not answered is BOOTSTRAPPING."""
        known = list(self._known.values())
        return min(here, *known, *([Status.BOOTSTRAPPING] if len(known) < self._count else []))

    def unsure(self, here: Status, addresses: Iterable[str]) -> list[str]:
        """The ranks on which the room may go on, as far as is known; none once it has failed on any rank."""
        if Status.FAILED in (here, *self._known.values()):
            return []
        return [address for address in addresses if self._known.get(address) is not Status.SUCCEEDED]
