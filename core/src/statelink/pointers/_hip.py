"""What HIP, the runtime of ROCm, knows about a pointer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from statelink._logs import logger
from statelink.errors import TransferError

from ._seen import Location, Seen

__all__ = ["Hip"]

log = logger("statelink.pointers")

INVALID_VALUE = 1
OLDEST = 60_000_000
"""Version 6.0. Before it, ``hipMemoryType`` had other numbers."""
LOCATIONS = {0: Location.UNKNOWN, 1: Location.HOST, 2: Location.DEVICE, 3: Location.MANAGED}


class Attributes(ctypes.Structure):
    """``hipPointerAttribute_t``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("is_managed", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class Hip:
    """The runtime's own functions. A call starts the runtime, so they are called only after it has started.

    Args:
        library: ``libamdhip64``, loaded.

    Raises:
        AttributeError: The library lacks one of the functions.
    """

    name = "HIP"

    def __init__(self, library: Any) -> None:
        self._attributes = library.hipPointerGetAttributes
        self._last_error = library.hipGetLastError
        self._version = library.hipRuntimeGetVersion
        self._library = library

    def binding(self, device: int) -> Callable[[], None]:
        """See `Driver.binding`."""

        def bind() -> None:
            status = self._library.hipSetDevice(ctypes.c_int(device))
            if status:
                log.warning("a thread of a link does not use device %d: HIP error %d", device, status)

        return bind

    def reader(self, device: int) -> None:
        """See `Driver.reader`."""

    def flushing(self, device: int) -> Callable[[], None]:
        """See `Driver.flushing`. It waits for the device, as vLLM's connector does for NIXL on ROCm."""

        def run() -> None:
            status = self._library.hipSetDevice(ctypes.c_int(device)) or self._library.hipDeviceSynchronize()
            if status:
                raise TransferError(f"writes to device {device} could not be flushed", cause=f"HIP error {status}")

        return run

    def look(self, address: int) -> Seen | None:
        """See `Driver.look`."""
        version = ctypes.c_int(0)
        if self._version(ctypes.byref(version)) or version.value < OLDEST:
            return None
        found = Attributes()
        status = self._attributes(ctypes.byref(found), ctypes.c_void_p(address))
        if status:
            self._last_error()  # clear the error: torch would find it after its next kernel, and raise
            return Seen(Location.UNKNOWN) if status == INVALID_VALUE else None
        if found.is_managed:
            return Seen(Location.MANAGED)
        location = LOCATIONS.get(found.type)
        return None if location is None else Seen(location, found.device if location is Location.DEVICE else -1)
