"""Arrays of a benchmark's pools: of numpy in host memory, or of torch on a device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .floor import Rows

__all__ = ["HOST", "Copied", "address", "fill", "moved", "rows", "seen", "zeros"]

HOST = "host"
"""Otherwise, ``--memory`` is a device as torch names it, such as ``cuda:0``."""


def zeros(shape: tuple[int, ...], dtype: str, memory: str) -> Any:
    """An array of ``int16``, ``uint8`` or ``float32``."""
    if memory == HOST:
        return np.zeros(shape, dtype)
    torch = importlib.import_module("torch")
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=memory)


def moved(array: npt.NDArray[Any], memory: str) -> Any:
    """An array with the same numbers."""
    if memory == HOST:
        return np.ascontiguousarray(array)
    return importlib.import_module("torch").from_numpy(np.ascontiguousarray(array)).to(memory)


def seen(array: Any) -> npt.NDArray[Any]:
    """Its numbers, in host memory."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.cpu().numpy())


def address(array: Any) -> int:
    """Of its first byte."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


def rows(array: Any, items: Any) -> Rows:
    """Address and length of some of its items, which lie one after the other."""
    nbytes = int(array.nbytes) // len(array)
    starts = address(array) + np.asarray(items) * nbytes
    return np.stack([starts, np.full(len(starts), nbytes)], axis=1).astype(np.uint64)


def fill(array: Any) -> None:
    """Touch every page with numbers that differ."""
    if isinstance(array, np.ndarray):
        array[:] = np.arange(array.size).astype(array.dtype).reshape(array.shape)
    else:
        torch = importlib.import_module("torch")
        array.copy_(torch.arange(array.numel(), device=array.device).to(array.dtype).reshape(array.shape))


class Copied:
    """Copies pages from one set of arrays on a device to another one there, which no transfer can do faster.

    Args:
        targets: The arrays that are written to.
        ids: Which items of each.
    """

    def __init__(self, targets: list[Any], ids: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._targets = targets
        self._ids = self._torch.as_tensor(np.ascontiguousarray(ids), device=targets[0].device)
        self._sources = [self._torch.zeros_like(each) for each in targets]

    def __call__(self) -> None:
        for source, target in zip(self._sources, self._targets, strict=True):
            target[self._ids] = source[self._ids]
        if self._targets[0].device.type == "cuda":
            self._torch.cuda.synchronize()
