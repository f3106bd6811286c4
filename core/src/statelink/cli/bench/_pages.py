"""The memory of one side: pages of one size, of which both sides know the right bytes."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from statelink import state
from statelink._devices import allocate
from statelink.backend import Region

__all__ = ["Pages"]

Rows = npt.NDArray[np.uint64]
SPARE = 8
"""One page in so many is spare, so that scattered pages are seldom neighbours."""


class Pages:
    """Pages on the host or on a device. They are freed with this object.

    Args:
        role: ``prefill`` has the right bytes from the start; ``decode`` has zeros.
        block: Bytes of a page.
        count: Most pages of a request.
        kind: Memory kind.
        allocator: See `statelink._devices.allocate`.
    """

    def __init__(self, role: str, block: int, count: int, kind: str, allocator: str) -> None:
        self.role, self.block = role, block
        self.number = count + max(1, count // SPARE)
        self._right = np.random.default_rng(block).integers(0, 256, (self.number, block), np.uint8)
        self._host = self._right if role == "prefill" else np.zeros_like(self._right)
        self._device = None if kind == "dram" else allocate(kind, self._host.nbytes, allocator)
        self.address = int(self._host.ctypes.data)
        if self._device is not None:
            self._device.write(0, self._host.reshape(-1))
            self.address = self._device.address
        self.region = Region(self.address, self._host.nbytes, kind)

    @property
    def on_host(self) -> bool:
        """Whether this process can read the pages as they are."""
        return self._device is None

    def inventory(self) -> state.Inventory:
        """One layer of pages, each of one token, in one buffer."""
        pages = state.Memory.pointer(self.address, (self.number, 1, self.block), "uint8", 1, kind=self.region.kind)
        return state.describe(f"bench-{self.role}", [state.mla_pages({0: pages})])

    def numbers(self, role: str, count: int, scattered: bool) -> npt.NDArray[np.intp]:
        """Pages of a request on the side with this role; both sides compute the same."""
        if not scattered:
            return np.arange(count)
        seed = [self.block, count, int(role == "decode")]
        return np.random.default_rng(seed).permutation(self.number)[:count]

    def rows(self, numbers: npt.NDArray[np.intp], address: int) -> Rows:
        """Addresses and lengths of pages of a pool that begins at ``address``."""
        starts = np.uint64(address) + numbers.astype(np.uint64) * np.uint64(self.block)
        return np.stack([starts, np.full(len(starts), self.block, np.uint64)], axis=1)

    def is_right(self, count: int, scattered: bool) -> bool:
        """Whether all pages of a request arrived, on decode."""
        if self._device is not None:
            self._device.read(0, self._host.reshape(-1))
        came = self._host[self.numbers("decode", count, scattered)]
        return bool(np.array_equal(came, self._right[self.numbers("prefill", count, scattered)]))

    def forget(self) -> None:
        """Zero the pages of decode."""
        self._host[:] = 0
        if self._device is not None:
            self._device.write(0, self._host.reshape(-1))

    def copy(self, count: int, scattered: bool) -> float:
        """Copy as many pages inside this process, on one thread. Returns the seconds."""
        source, target = (self.numbers(role, count, scattered) for role in ("prefill", "decode"))
        began = time.perf_counter()
        if scattered:
            self._host[target] = self._right[source]
        else:
            np.copyto(self._host[:count], self._right[:count])
        return time.perf_counter() - began
