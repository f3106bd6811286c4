"""Functions that run in a worker: what is kept of transfers that have ended."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from statelink.backend import Batch, Blocks, Transfer

if TYPE_CHECKING:
    from ._worker import Host

__all__ = ["Kept"]

WHAT = (Transfer, Batch, Blocks)
"""The classes of a transfer, of which objects are counted."""


class Kept(NamedTuple):
    """What Python keeps in a process.

    Attributes:
        nbytes: Bytes that Python and numpy have allocated since `trace`.
        objects: Number of objects that the garbage collector knows.
        alive: Number of objects of `WHAT` and of classes that derive from them, by the name of the class in `WHAT`.
    """

    nbytes: int
    objects: int
    alive: dict[str, int]


def trace(host: Host) -> None:
    """Begin to trace what Python allocates in this process."""
    tracemalloc.start()


def trace_no_more(host: Host) -> None:
    """End that."""
    tracemalloc.stop()


def kept(host: Host) -> Kept:
    """What Python keeps in this process, after garbage collection."""
    gc.collect()
    nbytes, _ = tracemalloc.get_traced_memory()
    objects = gc.get_objects()
    alive = Counter(kind.__name__ for each in objects for kind in WHAT if isinstance(each, kind))
    return Kept(nbytes, len(objects), dict(alive))
