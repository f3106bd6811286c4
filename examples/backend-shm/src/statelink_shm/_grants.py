"""What peers may write, and the fence that takes it back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from statelink.backend import Ranges
from statelink.errors import TransferError

if TYPE_CHECKING:
    from statelink.backend import Region

__all__ = ["Grants"]

U64 = npt.NDArray[np.uint64]
Key = tuple[str, int, int]


class Grants:
    """Ranges of our memory by peer, room and generation.

    Attributes:
        lock: Held while bytes are put in place: who has it knows that none are.
    """

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.lock = threading.Lock()
        try:
            self._registered = Ranges.of([(region.address, region.nbytes) for region in regions])
        except ValueError as error:
            raise TransferError("memory cannot be registered", cause=str(error), backend="shm") from error
        self._granted: dict[Key, Ranges] = {}

    def add(self, key: Key, addresses: U64, nbytes: U64) -> None:
        """Grant ranges, beside those that this use of the room has.

        Raises:
            TransferError: They are not registered.
        """
        if self._registered.outside(addresses, nbytes) is not None:
            raise TransferError("memory cannot be granted", cause="it is not registered", backend="shm")
        more = Ranges(addresses, nbytes)
        with self.lock:
            known = self._granted.get(key)
            self._granted[key] = more if known is None else known.union(more)

    def remove(self, key: Key) -> None:
        """Take a grant back. Once this returns nothing lands under it any more."""
        with self.lock:
            self._granted.pop(key, None)

    def forget(self, peer: str) -> None:
        """Take all grants of a peer back."""
        with self.lock:
            for key in [key for key in self._granted if key[0] == peer]:
                del self._granted[key]

    def clear(self) -> None:
        """Take all grants back."""
        with self.lock:
            self._granted.clear()

    def hold(self, key: Key, addresses: U64, nbytes: U64) -> bool:
        """Whether all of these blocks may be written; the lock is held."""
        known = self._granted.get(key)
        return known is not None and known.outside(addresses, nbytes) is None
