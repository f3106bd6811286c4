"""Streams and events of CUDA's driver, by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_uint, c_void_p
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device import Card

__all__ = ["DriverEvent", "DriverStream"]

CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_void_p)
NOT_READY = 600


class DriverStream:
    """Does what was launched on it in order, beside other streams.

    Args:
        card: The card. Its context is current.

    Attributes:
        handle: The driver's.
    """

    def __init__(self, card: Card) -> None:
        self._card, self.handle = card, c_void_p()
        self._kept: list[Any] = []
        """What the driver has yet to call."""
        card.call("cuStreamCreate", byref(self.handle), c_uint(1))

    def launch(self, work: Callable[[], object]) -> None:
        """Have the driver call this, in a thread of its own, before it goes on. A real driver lets it call no CUDA."""

        def called(stream: int, status: int, given: int) -> None:
            work()

        self._kept.append(CALLBACK(called))
        self._card.call("cuStreamAddCallback", self.handle, self._kept[-1], None, c_uint(0))

    def finish(self) -> None:
        """Wait until everything that was launched is done."""
        self._card.call("cuStreamSynchronize", self.handle)
        self._kept.clear()


class DriverEvent:
    """Passes when a stream has done what was launched on it before this was recorded."""

    def __init__(self, card: Card) -> None:
        self._card, self._event = card, c_void_p()
        card.call("cuEventCreate", byref(self._event), c_uint(0))

    def record(self, stream: DriverStream) -> None:
        """Record it on a stream."""
        self._card.call("cuEventRecord", self._event, stream.handle)

    def query(self) -> bool:
        """Whether the stream has passed it.

        Raises:
            RuntimeError: The driver reports an error.
        """
        status = self._card.cuda.cuEventQuery(self._event)
        if status not in (0, NOT_READY):
            raise RuntimeError(f"cuEventQuery: CUDA error {status}")
        return bool(status == 0)

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""
        self._card.call("cuEventSynchronize", self._event)
