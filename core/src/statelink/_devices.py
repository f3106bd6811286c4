"""Memory of a device that Statelink allocates: for rings of staging, the conformance kit and ``statelink doctor``.

torch is imported only when such memory is allocated.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from statelink.errors import BackendUnavailableError

__all__ = ["DeviceMemory", "TorchMemory", "allocate", "family"]

Array = npt.NDArray[np.uint8]


class DeviceMemory(Protocol):
    """Memory of a device. It is freed when nobody refers to it.

    Attributes:
        address: Address of its first byte, as libraries use it.
    """

    address: int

    def write(self, at: int, data: Array) -> None:
        """Copy host bytes (uint8, contiguous, writable) to offset ``at``. Returns when the copy is complete."""

    def read(self, at: int, data: Array) -> None:
        """Copy bytes from offset ``at`` into ``data`` (uint8, contiguous). Returns when the copy is complete."""


def allocate(kind: str, nbytes: int, by: str = "") -> DeviceMemory:
    """Allocate memory of a device; its bytes are zero. Blocks for as long as the device needs to start.

    Args:
        kind: The device, as in ``cuda:0`` or ``npu:0``.
        nbytes: Size.
        by: A function ``module:name`` that is called with these two, and returns `DeviceMemory`; torch if not given.

    Raises:
        BackendUnavailableError: There is no such device, or no library here can reach it.
    """
    who = f"{by or 'torch'} cannot allocate memory of kind {kind!r}"
    try:
        made: DeviceMemory = pkgutil.resolve_name(by)(kind, nbytes) if by else TorchMemory(kind, nbytes).clear()
    except ImportError as error:
        hint = "" if by else "install torch with support for this device; torch_npu brings that for 'npu'"
        raise BackendUnavailableError(who, cause=f"{type(error).__name__}: {error}", hint=hint) from error
    except Exception as error:  # any error of the device's driver
        hint = "a kind of memory names a device that is here, as in 'cuda:0'"
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise BackendUnavailableError(who, cause=cause, hint=hint) from error
    return made


def family(kind: str) -> str:
    """A memory kind without the number of its device."""
    return kind.partition(":")[0]


class TorchMemory:
    """Memory of a device that torch knows. Its bytes are whatever was there.

    Args:
        kind: The device, as torch names it.
        nbytes: Size.
    """

    def __init__(self, kind: str, nbytes: int) -> None:
        # Imported by name, because the core depends on no tensor library.
        torch: Any = importlib.import_module("torch")
        with contextlib.suppress(ImportError):  # packages such as torch_npu add their device to torch
            importlib.import_module(f"torch_{family(kind)}")
        self._torch = torch
        self._device = torch.device(kind)
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.address = int(self._bytes.data_ptr())

    def clear(self) -> TorchMemory:
        """Set every byte to zero, and return this memory. Returns when that is done."""
        self._bytes.zero_()
        self._wait()
        return self

    def write(self, at: int, data: Array) -> None:
        """See `DeviceMemory.write`."""
        self._bytes[at : at + data.size].copy_(self._torch.from_numpy(data.reshape(-1)))
        self._wait()

    def read(self, at: int, data: Array) -> None:
        """See `DeviceMemory.read`."""
        self._torch.from_numpy(data.reshape(-1)).copy_(self._bytes[at : at + data.size])
        self._wait()

    def _wait(self) -> None:
        """Wait for this stream, and for no other: a copy from pageable memory may return early."""
        if self._device.type != "cpu":
            getattr(self._torch, self._device.type).current_stream(self._device).synchronize()
