"""Bytes that say whose they are, in memory that two engines and the test look at."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LAYERS", "PAGE", "ROW", "TOKENS", "Memory", "Share", "key_of"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

LAYERS = 2
TOKENS = 16
"""Tokens of a page."""
PAGE = 64 << 10
"""Bytes of a page in one layer."""
ROW = 512
"""Bytes of a row of metadata."""

_MASK = (1 << 64) - 1
_RAMP: U64 = np.arange(PAGE // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def key_of(*words: int) -> int:
    """64 bits that stand for these numbers and, but for chance, for no others."""
    mixed = 0x243F6A8885A308D3
    for word in words:
        mixed = (mixed ^ word) + 0x9E3779B97F4A7C15 & _MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        mixed ^= mixed >> 31
    return mixed


class Share(NamedTuple):
    """One item of one component: a page of all layers, or a row of metadata."""

    component: str
    item: int


class Memory:
    """Pages and rows over one mapping; every 8 bytes of an item are its key plus their place.

    Args:
        descriptor: Of memory that others may have mapped too.
        pages: Pages.
        rows: Rows of metadata.
    """

    def __init__(self, descriptor: int, pages: int, rows: int) -> None:
        self.pages, self.rows = pages, rows
        self._map = mmap.mmap(descriptor, self.size(pages, rows))
        whole = np.frombuffer(self._map, np.uint8)
        self.layers: list[U8] = [
            whole[n * pages * PAGE : (n + 1) * pages * PAGE].reshape(pages, TOKENS, PAGE // TOKENS)
            for n in range(LAYERS)
        ]
        start = LAYERS * pages * PAGE
        self.row: U8 = whole[start : start + rows * ROW].reshape(rows, ROW)

    @staticmethod
    def size(pages: int, rows: int) -> int:
        """Bytes of the mapping."""
        return -(-(LAYERS * pages * PAGE + rows * ROW) // 4096) * 4096

    def shares(self) -> list[Share]:
        """Everything that there is."""
        return [Share("kv", n) for n in range(self.pages)] + [Share("aux", n) for n in range(self.rows)]

    def views(self, share: Share) -> list[U8]:
        """The bytes of an item, in each layer."""
        if share.component == "aux":
            return [self.row[share.item]]
        return [layer[share.item].reshape(-1) for layer in self.layers]

    def fill(self, share: Share, key: int) -> None:
        """Make it whole under a key."""
        for layer, view in enumerate(self.views(share)):
            np.add(_RAMP[: len(view) // 8], np.uint64(key_of(key, layer)), out=view.view(np.uint64))

    def foreign(self, share: Share, *keys: int) -> int:
        """How many of its bytes are none of these keys'. A torn word may hold bytes of several of them."""
        found = 0
        for layer, view in enumerate(self.views(share)):
            words = view.view(np.uint64)
            ramp = _RAMP[: len(words)]
            wanted = [ramp + np.uint64(key_of(key, layer)) for key in keys]
            if np.array_equal(words, wanted[0]):
                continue
            known = np.zeros(len(view), np.bool_)
            for each in wanted:
                known |= view == each.view(np.uint8)
            found += len(view) - int(known.sum())
        return found

    def nbytes(self, share: Share) -> int:
        """Bytes of an item."""
        return ROW if share.component == "aux" else LAYERS * PAGE
