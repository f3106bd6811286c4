"""The sources of knowledge about a pointer: the process's map, and the drivers that the process has loaded."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from statelink._logs import logger

from ._cuda import Cuda
from ._hip import Hip
from ._map import read_map

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ._map import ProcessMap
    from ._seen import Seen

__all__ = ["Driver", "Platform", "Reader"]

log = logger("statelink.pointers")


class Reader(Protocol):
    """Reads memory of a device from the host. Thread-safe; blocks."""

    def read(self, addresses: Sequence[int], nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of stretches of one length, in order and without gaps, in pieces of a bounded size.

        Each piece counts until the next one is asked for.

        Args:
            addresses: Where each stretch begins, on the device.
            nbytes: Bytes of each.

        Raises:
            TransferError: The driver reports an error.
        """


class Driver(Protocol):
    """A device's driver."""

    name: str
    """Name of the driver, for errors."""

    def look(self, address: int) -> Seen | None:
        """What the driver knows about an address; ``None`` if it cannot tell."""

    def binding(self, device: int) -> Callable[[], None]:
        """A function that lets the thread that calls it use a device, from then on. It never raises, and logs errors.

        Args:
            device: The device's number in this process. Memory of it is there, so that nothing new is started.
        """

    def reader(self, device: int) -> Reader | None:
        """What reads memory of a device from the host; ``None`` if that is not built for this driver."""

    def flushing(self, device: int) -> Callable[[], None] | None:
        """A function that makes others' writes to a device visible to kernels that start after it.

        When a peer's write has ended, its bytes may still be on the way from a network card to the device. ``None`` if
        the device itself keeps them in order. The function may block, on any thread.

        Raises:
            TransferError: Raised by the function: the driver reports an error.
        """


class Platform:
    """What can tell about memory at this time.

    Args:
        map_: The process's map, if there is one.
        drivers: Drivers of devices that torch calls ``cuda``.
    """

    def __init__(self, map_: ProcessMap | None, drivers: Sequence[Driver] = ()) -> None:
        self.map = map_
        self.drivers = tuple(drivers)

    @classmethod
    def here(cls) -> Platform:
        """The platform of this process. Reads its map once. Loads and starts no driver."""
        map_ = read_map()
        return cls(map_, [] if map_ is None else loaded(map_.names))


def loaded(names: Sequence[str], load: Callable[[str], Any] | None = None) -> list[Driver]:
    """The drivers among the files that a process has mapped.

    This function loads no driver. A driver that is not loaded has allocated nothing. Loading could start it, and a
    process that has started a driver cannot fork.

    Args:
        names: Names of mappings.
        load: Returns a library that is already loaded, by its path.

    Returns:
        The drivers that have the functions that are needed.
    """
    load = load or _handle
    found: list[Driver] = []
    started = any(name.startswith(("/dev/kfd", "/dev/dri/")) for name in names)
    for name in names:
        file = PurePath(name).name
        try:
            if file.startswith("libcuda.so"):
                found.append(Cuda(load(name)))
            # Any call starts HIP. It has started if the process has its device mapped.
            elif file.startswith("libamdhip64.so") and started:
                found.append(Hip(load(name)))
        except (OSError, AttributeError) as error:  # the file was replaced on disk, or is not what its name says
            log.debug("%s is not asked about memory: %s", name, error)
    return found


def _handle(path: str) -> Any:
    # Without this flag, a file that the loader has not loaded would be loaded here.
    return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
