"""What peers may write, and the fence that takes it back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

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
        self._registered = _Ranges(
            np.array([region.address for region in regions], np.uint64),
            np.array([region.nbytes for region in regions], np.uint64),
        )
        self._granted: dict[Key, _Ranges] = {}

    def add(self, key: Key, addresses: U64, nbytes: U64) -> None:
        """Grant ranges, beside those that this use of the room has.

        Raises:
            TransferError: They are not registered.
        """
        if not self._registered.hold(addresses, nbytes):
            raise TransferError("memory cannot be granted", cause="it is not registered", backend="shm")
        with self.lock:
            known = self._granted.get(key)
            self._granted[key] = _Ranges(addresses, nbytes) if known is None else known.and_also(addresses, nbytes)

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
        return known is not None and known.hold(addresses, nbytes)


class _Ranges:
    """A set of bytes, as ranges that are sorted and apart."""

    def __init__(self, addresses: U64, nbytes: U64) -> None:
        order = np.argsort(addresses)
        first, last = addresses[order], (addresses + nbytes - np.uint64(1))[order]
        reach = np.maximum.accumulate(last)
        apart = np.ones(len(first), np.bool_)
        apart[1:] = first[1:] > reach[:-1] + np.uint64(1)
        self._first: U64 = first[apart]
        self._last: U64 = reach[np.append(apart[1:], True)[: len(first)]]

    def and_also(self, addresses: U64, nbytes: U64) -> _Ranges:
        """This set, and more."""
        sizes = self._last - self._first + np.uint64(1)
        return _Ranges(np.concatenate((self._first, addresses)), np.concatenate((sizes, nbytes)))

    def hold(self, addresses: U64, nbytes: U64) -> bool:
        """Whether every block lies inside one range."""
        if not len(self._first):
            return not len(addresses)
        after = np.searchsorted(self._first, addresses, side="right")
        last = self._last[np.maximum(after, 1) - 1]
        # A difference that wraps around is masked by the comparison before it.
        fits = (addresses <= last) & (nbytes - np.uint64(1) <= last - addresses)
        return bool(((after > 0) & (nbytes > 0) & fits).all())
