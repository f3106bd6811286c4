"""The memory of rings, and gathering and scattering: with numpy on the host, with the engine's torch on a device."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from statelink.errors import UnsupportedError

if TYPE_CHECKING:
    from statelink.plan import Places

__all__ = ["HostMemory", "StagingMemory", "TorchMemory", "staging_memory"]

PAGE = 4096


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
    torch = sys.modules.get("torch")
    if torch is None or kind.partition(":")[0] != "cuda":
        raise UnsupportedError(
            f"memory of kind {kind!r} cannot be staged",
            cause="the process has not imported torch" if torch is None else "only 'dram' and 'cuda' can",
            hint="leave its components out of staging",
        )
    return TorchMemory(torch, kind, nbytes)


class _Bytes:
    """A range of memory with the array interfaces of numpy and of torch."""

    def __init__(self, address: int, nbytes: int) -> None:
        described = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self.__array_interface__ = described
        self.__cuda_array_interface__ = {**described, "strides": None}


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
                there = np.asarray(_Bytes(address, last * tile.width)).reshape(last, tile.width)
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
                there = np.asarray(_Bytes(address, last * tile.width)).view(row)
                there[tile.rows] = self._bytes[at : at + size].view(row)
                at += size


class TorchMemory:
    """Memory of a device that torch knows. Gathering and scattering run on the device, on a stream of their own.

    Args:
        torch: The module, which the engine has imported.
        kind: The device, as torch names it.
        nbytes: Size.
    """

    def __init__(self, torch: Any, kind: str, nbytes: int) -> None:
        self._torch = torch
        self._device = torch.device(kind)
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.address = int(self._bytes.data_ptr())
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
            size = len(tile.rows) * tile.width
            last = int(tile.rows.max()) + 1
            rows = self._torch.from_numpy(tile.rows).to(self._device)
            for address in tile.addresses.tolist():
                there = self._view(address, last * tile.width).view(last, tile.width)
                copy(there, rows, self._bytes[at : at + size].view(-1, tile.width))
                at += size

    def _pack(self, there: Any, rows: Any, here: Any) -> None:
        self._torch.index_select(there, 0, rows, out=here)

    def _unpack(self, there: Any, rows: Any, here: Any) -> None:
        there.index_copy_(0, rows, here)

    def _view(self, address: int, nbytes: int) -> Any:
        view = _Bytes(address, nbytes)
        if self._stream is None:
            return self._torch.from_numpy(np.asarray(view))
        return self._torch.as_tensor(view, device=self._device)
