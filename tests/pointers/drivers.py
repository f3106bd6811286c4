"""Stand-ins for drivers: real C functions with the libraries' signatures, over memory that a test makes up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from tests.helpers.system import System

from statelink import state

BASE = 0x7_0000_0000
"""Where made-up memory of devices begins: nothing is mapped there."""
UINT, POINTER, UINT64 = ctypes.c_uint, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)
NVIDIA, AMD = "/usr/lib/libcuda.so.570.86.15", "/opt/rocm/lib/libamdhip64.so.6.3.60300"


class Piece(NamedTuple):
    """An allocation that a stand-in knows.

    Attributes:
        start: First byte.
        nbytes: Length.
        type: ``CUmemorytype``: 1 is the host's, 2 a device's.
        device: Its device.
        attributes: Others, by number; what is not here has the value 0.
        virtual: Whether it has a handle.
    """

    start: int
    nbytes: int
    type: int = 2
    device: int = 0
    attributes: dict[int, int] = {10: 1, 15: 1}  # noqa: RUF012 - never written
    virtual: bool = False


def find(pieces: Sequence[Piece], address: int | None) -> Piece | None:
    return next((each for each in pieces if each.start <= (address or 0) < each.start + each.nbytes), None)


def c(function: Callable[..., int], *arguments: Any) -> Any:
    """A C function of these arguments, which returns a status."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function)


def cuda(*pieces: Piece, status: int = 0, lacks: Sequence[str] = (), below: int = 1 << 64) -> Any:
    """``libcuda``; with a ``status`` every call fails, and ``lacks`` names functions of newer drivers.

    It answers for addresses ``below`` one.
    """
    held: set[int] = set()

    def value(piece: Piece | None, attribute: int) -> int:
        if piece is None:
            return 0
        mapping = {11: piece.start, 12: piece.nbytes, 18: piece.nbytes, 19: piece.start}
        known = {2: piece.type, 9: piece.device, **mapping, **piece.attributes}
        return known.get(attribute, 0)

    def attributes(count: int, numbers: Any, places: Any, address: int) -> int:
        if address >= below:
            return 1
        if not status:
            for number, place in zip(numbers[:count], places[:count], strict=True):
                # Narrow on purpose, as the driver writes them.
                ctypes.cast(place, ctypes.POINTER(ctypes.c_uint))[0] = value(find(pieces, address), number)
        return status

    def attribute(place: Any, number: int, address: int) -> int:
        piece = find(pieces, address)
        if status or piece is None:
            return status or 1
        ctypes.cast(place, UINT64)[0] = value(piece, number)
        return 0

    def retain(handle: Any, address: int | None) -> int:
        piece = find(pieces, address)
        if piece is None or not piece.virtual:
            return 1
        ctypes.cast(handle, UINT64)[0] = piece.start
        held.add(piece.start)
        return 0

    def release(handle: int) -> int:
        held.remove(handle)
        return 0

    functions: dict[str, Any] = {
        "cuPointerGetAttributes": c(attributes, UINT, ctypes.POINTER(UINT), ctypes.POINTER(POINTER), ctypes.c_uint64),
        "cuPointerGetAttribute": c(attribute, POINTER, UINT, ctypes.c_uint64),
        "cuMemRetainAllocationHandle": c(retain, POINTER, POINTER),
        "cuMemRelease": c(release, ctypes.c_uint64),
        "cuDeviceGet": c(lambda place, number: 0, POINTER, ctypes.c_int),
        "cuDevicePrimaryCtxRetain": c(lambda place, number: 0, POINTER, ctypes.c_int),
        "cuCtxSetCurrent": c(lambda context: 0, POINTER),
        "cuDeviceGetAttribute": c(lambda place, which, number: 1, POINTER, ctypes.c_int, ctypes.c_int),
        "held": held,
    }
    return SimpleNamespace(**{name: each for name, each in functions.items() if name not in lacks})


def hip(*pieces: Piece, version: int = 60_300_000) -> Any:
    """``libamdhip64``; ``errors`` counts those that nobody has fetched."""
    library = SimpleNamespace(errors=0)

    def attributes(place: Any, address: int | None) -> int:
        piece = find(pieces, address)
        if piece is None:
            library.errors += 1
            return 1
        numbers = ctypes.cast(place, ctypes.POINTER(ctypes.c_int))
        numbers[0], numbers[1] = piece.type, piece.device
        return 0

    def last_error() -> int:
        found, library.errors = library.errors, 0
        return int(bool(found))

    def runtime_version(place: Any) -> int:
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = version
        return 0

    library.hipPointerGetAttributes = c(attributes, POINTER, POINTER)
    library.hipGetLastError = c(last_error)
    library.hipRuntimeGetVersion = c(runtime_version, POINTER)
    return library


def loaded(*drivers: Any) -> System:
    """A process that has loaded these, and started them."""
    names = ((AMD if hasattr(each, "hipGetLastError") else NVIDIA, each) for each in drivers)
    return System().load(*names, ("/dev/kfd", None))


def inventory(*regions: state.Region) -> state.Inventory:
    """One component a region, of rows that fill it."""
    described = []
    for number, region in enumerate(regions):
        rows = state.Memory.pointer(region.address, (1, region.nbytes), "uint8", 1, region=region)
        described.append(state.aux_rows({"row": rows}, name=f"rows-{number}"))
    return state.describe("here", described)


def host(nbytes: int = 4096) -> tuple[np.ndarray[Any, Any], state.Region]:
    """Memory of this process."""
    array = np.zeros(nbytes, np.uint8)
    return array, state.Region(array.ctypes.data, nbytes)
