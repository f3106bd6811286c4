"""Memory of a card for `statelink doctor --allocator` and `statelink conform --allocator`, without torch."""

from __future__ import annotations

from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import TYPE_CHECKING

import numpy as np

from .device import Card

if TYPE_CHECKING:
    from .device import Bytes

__all__ = ["Memory"]


class Memory:
    """Memory of the driver; its bytes are zero. Any thread may copy: each copy sets the context of its thread.

    Args:
        kind: The card, such as ``cuda:0``.
        nbytes: Size.
    """

    def __init__(self, kind: str, nbytes: int) -> None:
        self._card = Card(int(kind.partition(":")[2] or 0))
        self._context = c_void_p()
        self._card.call("cuCtxGetCurrent", byref(self._context))
        self._buffer = self._card.buffer(max(1, nbytes))
        self.address = self._buffer.address
        self.write(0, np.zeros(nbytes, np.uint8))

    def write(self, at: int, data: Bytes) -> None:
        """Copy host bytes to offset ``at``."""
        self._card.call("cuCtxSetCurrent", self._context)
        source, size = c_void_p(data.ctypes.data), c_size_t(data.nbytes)
        self._card.call("cuMemcpyHtoD_v2", c_uint64(self.address + at), source, size)

    def read(self, at: int, data: Bytes) -> None:
        """Copy bytes from offset ``at``."""
        self._card.call("cuCtxSetCurrent", self._context)
        target, size = c_void_p(data.ctypes.data), c_size_t(data.nbytes)
        self._card.call("cuMemcpyDtoH_v2", target, c_uint64(self.address + at), size)
