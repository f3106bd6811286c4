"""What the CUDA driver knows about a pointer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from statelink._logs import logger
from statelink.errors import TransferError

from ._cuda_reader import CudaReader
from ._seen import Location, Origin, Seen

__all__ = ["Cuda"]

log = logger("statelink.pointers")

# CUpointer_attribute
MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, IPC_CAPABLE = 2, 8, 9, 10
RANGE_START, RANGE_SIZE, RDMA_CAPABLE, POOL, MAPPING_SIZE, MAPPING_START = 11, 12, 15, 17, 18, 19
# CUmemorytype
HOST, DEVICE = 1, 2
# CUresult
NOT_INITIALIZED = 3
# CUdevice_attribute, and what they may say
FLUSH_OPTIONS, WRITES_ORDERING = 117, 118
BY_HOST, OWNER = 1, 100
# cuFlushGPUDirectRDMAWrites: the device of the current context, and who has to see the writes
CURRENT_CONTEXT = 0


class Cuda:
    """The driver's own functions. They need no context and start nothing. They fail if the driver was not started.

    Args:
        library: ``libcuda``, loaded.

    Raises:
        AttributeError: The library lacks one of the functions.
    """

    name = "the CUDA driver"

    def __init__(self, library: Any) -> None:
        self._attributes = library.cuPointerGetAttributes
        self._attribute = library.cuPointerGetAttribute
        self._library = library
        self._handles = (
            getattr(library, "cuMemRetainAllocationHandle", None),
            getattr(library, "cuMemRelease", None),
        )

    def binding(self, device: int) -> Callable[[], None]:
        """See `Driver.binding`. The device's primary context is kept for as long as the process lives."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        get, retain = self._library.cuDeviceGet, self._library.cuDevicePrimaryCtxRetain
        status = get(ctypes.byref(number), ctypes.c_int(device)) or retain(ctypes.byref(context), number)
        if status:
            log.warning("threads of links do not use device %d: CUDA error %d", device, status)
            return lambda: None

        def bind() -> None:
            status = self._library.cuCtxSetCurrent(context)
            if status:
                log.warning("a thread of a link does not use device %d: CUDA error %d", device, status)

        return bind

    def reader(self, device: int) -> CudaReader:
        """See `Driver.reader`."""
        return CudaReader(self._library, device)

    def flushing(self, device: int) -> Callable[[], None] | None:
        """See `Driver.flushing`. NVIDIA's driver says for each device whether its kernels see such writes in order.

        That is `cuFlushGPUDirectRDMAWrites`_, which is needed where ``GPU_DIRECT_RDMA_WRITES_ORDERING`` is below
        ``OWNER``.

        .. _cuFlushGPUDirectRDMAWrites: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
        """
        number, context = ctypes.c_int(), ctypes.c_void_p()
        if self._library.cuDeviceGet(ctypes.byref(number), ctypes.c_int(device)):
            return None
        if self._of_device(WRITES_ORDERING, number, OWNER) >= OWNER:  # a driver that does not know it is older than it
            return None
        flush = getattr(self._library, "cuFlushGPUDirectRDMAWrites", None)
        if flush is None or not self._of_device(FLUSH_OPTIONS, number, 0) & BY_HOST:
            said = (
                "device %d does not order the writes of network cards, and the host cannot flush them: see docs/gpu.md"
            )
            log.warning(said, device)
            return None
        if self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number):
            return None

        def run() -> None:
            left = ctypes.c_void_p()
            status = self._library.cuCtxPushCurrent_v2(context)
            if not status:
                status = flush(ctypes.c_int(CURRENT_CONTEXT), ctypes.c_int(OWNER))
                self._library.cuCtxPopCurrent_v2(ctypes.byref(left))
            if status:
                raise TransferError(f"writes to device {device} could not be flushed", cause=f"CUDA error {status}")

        return run

    def _of_device(self, attribute: int, number: ctypes.c_int, otherwise: int) -> int:
        """An attribute of a device."""
        value = ctypes.c_int()
        status = self._library.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), number)
        return otherwise if status else value.value

    def look(self, address: int) -> Seen | None:
        """See `Driver.look`."""
        # Unlike the function for one attribute, this one fails only if the driver cannot answer at all.
        asked = (MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL)
        found = [ctypes.c_uint64(0) for _ in asked]
        status = self._attributes(
            ctypes.c_uint(len(asked)),
            (ctypes.c_uint * len(asked))(*asked),
            (ctypes.c_void_p * len(asked))(*(ctypes.addressof(each) for each in found)),
            ctypes.c_uint64(address),
        )
        if status:
            return Seen(Location.NOT_STARTED) if status == NOT_INITIALIZED else None
        kind, managed, device = (each.value for each in found)
        if managed:
            return Seen(Location.MANAGED)
        if kind != DEVICE:
            return Seen(Location.HOST if kind == HOST else Location.UNKNOWN)
        origin, direct = self._origin(address), self._get(RDMA_CAPABLE, address)
        start, size = self._get(RANGE_START, address), self._get(RANGE_SIZE, address)
        if origin is Origin.VIRTUAL:  # its range is what was reserved; only pieces of it may be mapped
            start, size = self._get(MAPPING_START, address), self._get(MAPPING_SIZE, address)
        end = start + size if start and size else 0
        return Seen(Location.DEVICE, device, end, origin, None if direct is None else bool(direct))

    def _origin(self, address: int) -> Origin:
        if self._get(IPC_CAPABLE, address):
            return Origin.PLAIN
        if self._get(POOL, address):
            return Origin.POOL
        handle = ctypes.c_uint64(0)
        retain, release = self._handles
        if retain is None or release is None or retain(ctypes.byref(handle), ctypes.c_void_p(address)):
            return Origin.UNKNOWN
        release(handle)
        return Origin.VIRTUAL  # no other memory has a handle

    def _get(self, attribute: int, address: int) -> int | None:
        """One attribute; ``None`` if this driver does not know it. No attribute is larger than 64 bits."""
        value = ctypes.c_uint64(0)
        status = self._attribute(ctypes.byref(value), ctypes.c_uint(attribute), ctypes.c_uint64(address))
        return None if status else value.value
