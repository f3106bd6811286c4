"""How many bytes a writer owes for a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from statelink.plan import due

if TYPE_CHECKING:
    from statelink.plan import PairPlan

__all__ = ["Owed"]

REMEMBERED = 256
"""Most requests, by their numbers of tokens, of which the bytes are remembered."""


class Owed:
    """Computes the bytes that a writer owes, from its plan alone. Control thread.

    It remembers the numbers of the last requests, since many requests have the same numbers of tokens.

    Args:
        plan: What the writer writes.
    """

    def __init__(self, plan: PairPlan) -> None:
        self._components = plan.components
        self._known: dict[tuple[int, int], Mapping[str, int]] = {}

    def nbytes(self, tokens: int, prefix: int) -> Mapping[str, int]:
        """Bytes per component of a request, where there are any. The caller does not change the result.

        Raises:
            RoomError: The prefix ends inside an item of a type that moves whole items.
        """
        found = self._known.get((tokens, prefix))
        if found is None:
            found = self._known[tokens, prefix] = self._computed(tokens, prefix)
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        return found

    def _computed(self, tokens: int, prefix: int) -> dict[str, int]:
        owed = {
            name: part.granule_nbytes * len(due(part.source, part.target, tokens, prefix))
            for name, part in self._components.items()
        }
        return {name: nbytes for name, nbytes in owed.items() if nbytes}
