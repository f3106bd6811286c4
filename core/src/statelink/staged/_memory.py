"""The memory of rings, and gathering and scattering: with numpy on the host, with the engine's torch on a device."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from statelink._devices import TorchMemory, family
from statelink.errors import UnsupportedError

if TYPE_CHECKING:
    from statelink.plan import Places

__all__ = ["DeviceRing", "HostMemory", "StagingMemory", "staging_memory"]

PAGE = 4096
WIDE_BYTES = 8
"""Bytes of the elements as which rows are copied on a device, where addresses and widths are multiples of it."""


class StagingMemory(Protocol):
    """Registered memory of a fixed size. One thread packs or unpacks one part of it at a time."""

    address: int
    nbytes: int
    kind: str

    def pack(self, tiles: Iterable[Places], at: int) -> None:
        """Gather the bytes of tiles, one after the other, from offset ``at`` on. Returns when they are there."""

    def unpack(self, tiles: Iterable[Places], at: int) -> None:
        """Scatter the bytes from offset ``at`` on to their tiles. Returns when they are in place."""


def staging_memory(kind: str, nbytes: int) -> StagingMemory:
    """Allocate memory of the same kind as a component's.

    Raises:
        UnsupportedError: The memory is on a device that no library here can reach.
    """
    if kind == "dram":
        return HostMemory(nbytes)
    imported = "torch" in sys.modules
    if not imported or family(kind) != "cuda":
        raise UnsupportedError(
            f"memory of kind {kind!r} cannot be staged",
            cause="only 'dram' and 'cuda' can" if imported else "the process has not imported torch",
            hint="leave its components out of staging",
        )
    try:
        return DeviceRing(kind, nbytes)
    except AssertionError as error:  # as torch says that it was built without CUDA
        raise UnsupportedError(
            f"memory of kind {kind!r} cannot be staged",
            cause=str(error),
            hint="install a build of torch for this device, or leave its components out of staging",
        ) from error


class _Array:
    """Memory with the array interfaces of numpy and of torch.

    Args:
        address: Where it begins.
        shape: Elements on each axis.
        strides: Bytes from one element to the next, on each axis; ``None`` if there are no gaps.
        element: The type of its elements, as numpy writes it.
    """

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, element: str = "|u1"
    ) -> None:
        described = {"data": (address, False), "shape": shape, "strides": strides, "typestr": element, "version": 3}
        self.__array_interface__ = described
        self.__cuda_array_interface__ = described


class HostMemory:
    """Host memory."""

    kind = "dram"

    def __init__(self, nbytes: int) -> None:
        whole = np.empty(nbytes + PAGE, np.uint8)
        start = -whole.ctypes.data % PAGE
        self._bytes = whole[start : start + nbytes]
        self.address = int(self._bytes.ctypes.data)
        self.nbytes = nbytes

    def pack(self, tiles: Iterable[Places], at: int) -> None:
        """See `StagingMemory.pack`."""
        for tile in tiles:
            size = len(tile.rows) * tile.width
            last = int(tile.rows.max()) + 1
            for address in tile.addresses.tolist():
                there = np.asarray(_Array(address, (last, tile.width)))
                here = self._bytes[at : at + size].reshape(-1, tile.width)
                np.take(there, tile.rows, axis=0, out=here, mode="clip")  # any other mode copies once more
                at += size

    def unpack(self, tiles: Iterable[Places], at: int) -> None:
        """See `StagingMemory.unpack`."""
        for tile in tiles:
            size = len(tile.rows) * tile.width
            last = int(tile.rows.max()) + 1
            row = np.dtype((np.void, tile.width))  # each row is one element, which is twice as fast as rows of bytes
            for address in tile.addresses.tolist():
                there = np.asarray(_Array(address, (last * tile.width,))).view(row)
                there[tile.rows] = self._bytes[at : at + size].view(row)
                at += size


class DeviceRing(TorchMemory):
    """Memory of a device, in the engine's torch. Gathering and scattering run on the device, on a stream of their own.

    Args:
        kind: The device, as torch names it.
        nbytes: Size.
    """

    def __init__(self, kind: str, nbytes: int) -> None:
        super().__init__(kind, nbytes)
        self._stream = self._torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.nbytes = nbytes
        self.kind = kind

    def pack(self, tiles: Iterable[Places], at: int) -> None:
        """See `StagingMemory.pack`."""
        self._on_device(tiles, at, self._pack)

    def unpack(self, tiles: Iterable[Places], at: int) -> None:
        """See `StagingMemory.unpack`."""
        self._on_device(tiles, at, self._unpack)

    def _on_device(self, tiles: Iterable[Places], at: int, copy: Any) -> None:
        if self._stream is None:
            self._each(tiles, at, copy)
            return
        with self._torch.cuda.stream(self._stream):
            self._each(tiles, at, copy)
        self._stream.synchronize()

    def _each(self, tiles: Iterable[Places], at: int, copy: Any) -> None:
        for tile in tiles:
            count, width = len(tile.rows), tile.width
            rows = self._torch.from_numpy(tile.rows).to(self._device)
            last = int(tile.rows.max()) + 1
            for address, step, arrays in _evenly_spaced(tile.addresses):
                nbytes = arrays * count * width
                # Wide elements are copied several times as fast as bytes.
                wide = not (width | address | step | self.address + at) % WIDE_BYTES
                unit, element = (WIDE_BYTES, "<i8") if wide else (1, "|u1")
                shape, strides = (arrays, last, width // unit), (step or last * width, width, unit)
                here = self._bytes[at : at + nbytes]
                here = here.view(self._torch.int64) if wide else here
                copy(self._view(_Array(address, shape, strides, element)), rows, here.view(arrays, count, -1))
                at += nbytes

    def _pack(self, there: Any, rows: Any, here: Any) -> None:
        self._torch.index_select(there, 1, rows, out=here)

    def _unpack(self, there: Any, rows: Any, here: Any) -> None:
        there.index_copy_(1, rows, here)

    def _view(self, array: _Array) -> Any:
        if self._stream is None:
            return self._torch.from_numpy(np.asarray(array))
        return self._torch.as_tensor(array, device=self._device)


def _evenly_spaced(addresses: npt.NDArray[np.uint64]) -> Iterator[tuple[int, int, int]]:
    """The addresses as runs of one step: where each begins, its step, and how many it has.

    The arrays of many layers often lie in one allocation, or in allocations one after the other. Such a run is one
    call of torch, and one object, instead of one for each array: each takes about 20 µs of a thread.
    """
    listed = addresses.tolist()
    first = 0
    while first < len(listed):
        end = first + 1
        step = listed[end] - listed[first] if end < len(listed) else 0
        if step > 0:
            while end < len(listed) and listed[end] - listed[end - 1] == step:
                end += 1
        yield listed[first], max(step, 0), end - first
        first = end
