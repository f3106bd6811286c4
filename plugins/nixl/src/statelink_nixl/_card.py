"""A few bytes of a card's memory that peers may overwrite, as `SCRATCH` is in host memory.

A first write between two such pieces shows which transport carries bytes between two cards. It says the same of the
pools only if these were allocated in the same way, as plain memory of ``cudaMalloc``.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statelink.backend import Region

__all__ = ["CARD_SCRATCH_BYTES", "scratch_beside"]

CARD_SCRATCH_BYTES = 4096
IPC_CAPABLE = 10
"""``CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE``: memory of ``cudaMalloc`` alone."""

_lock = threading.Lock()
_made: dict[int, int] = {}
"""Per device, the address. It is never freed, so that a late write does not land in other memory."""


def scratch_beside(regions: Iterable[Region], device: int) -> int:
    """The address of scratch memory on a device; 0 if it would not stand for these regions, or the driver refuses it.

    Blocks for some milliseconds when it is called first for a device.

    Args:
        regions: Regions of memory of that device.
        device: Its number in this process.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return 0
    for region in regions:
        plain = c_uint64(0)
        if driver.cuPointerGetAttribute(byref(plain), c_uint(IPC_CAPABLE), c_uint64(region.address)) or not plain.value:
            return 0
    with _lock:
        if device not in _made:
            _made[device] = _allocate(driver, device)
        return _made[device]


def _allocate(driver: Any, device: int) -> int:
    number, context, address = c_int(), c_void_p(), c_uint64()
    if driver.cuDeviceGet(byref(number), c_int(device)) or driver.cuDevicePrimaryCtxRetain(byref(context), number):
        return 0
    if driver.cuCtxPushCurrent_v2(context):
        return 0
    status = driver.cuMemAlloc_v2(byref(address), c_size_t(CARD_SCRATCH_BYTES))
    driver.cuCtxPopCurrent_v2(byref(c_void_p()))
    return 0 if status else int(address.value)
