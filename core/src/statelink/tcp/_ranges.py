"""Arithmetic on ranges of memory, beside `statelink.backend.Ranges`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["U64", "merge"]

U64 = npt.NDArray[np.uint64]


def merge(addresses: U64, nbytes: U64) -> tuple[U64, U64]:
    """Join each range with the next ones in the list, if they continue it in memory."""
    if len(addresses) < 2:
        return addresses, nbytes
    apart = addresses[1:] != addresses[:-1] + nbytes[:-1]
    if np.logical_and.reduce(apart):  # all of them; `ndarray.all` calls the same through a function in Python
        return addresses, nbytes
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return addresses[first], np.add.reduceat(nbytes, first)
