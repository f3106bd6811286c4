"""Whom to ask about a pointer: the process's map, and those drivers that the process has loaded by itself."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from ._cuda import Cuda
from ._hip import Hip
from ._map import read_map

if TYPE_CHECKING:
    from ._map import ProcessMap
    from ._seen import Seen

__all__ = ["Driver", "Platform"]

log = logging.getLogger("statelink.pointers")


class Driver(Protocol):
    """A device's driver."""

    name: str
    """As it is said in an error."""

    def look(self, address: int) -> Seen | None:
        """What it knows of an address; ``None`` if it cannot tell, as before its start and after a fork."""


class Platform:
    """What can be asked about memory, as of now.

    Args:
        map_: The process's map, if there is one.
        drivers: Drivers of devices that torch calls ``cuda``.
    """

    def __init__(self, map_: ProcessMap | None, drivers: Sequence[Driver] = ()) -> None:
        self.map = map_
        self.drivers = tuple(drivers)

    @classmethod
    def here(cls) -> Platform:
        """This process's. Reads its map once, and neither loads nor starts a driver."""
        map_ = read_map()
        return cls(map_, [] if map_ is None else loaded(map_.names))


def loaded(names: Sequence[str], load: Callable[[str], Any] | None = None) -> list[Driver]:
    """Drivers among the files that a process has mapped.

    A driver that nobody has loaded has allocated nothing either, so none is ever loaded here: that could start it,
    and a process that has started one cannot fork any more.

    Args:
        names: Names of mappings.
        load: A library that is loaded, by its path.

    Returns:
        Those that have what is asked of them.
    """
    load = load or _handle
    found: list[Driver] = []
    started = any(name.startswith(("/dev/kfd", "/dev/dri/")) for name in names)
    for name in names:
        file = PurePath(name).name
        try:
            if file.startswith("libcuda.so"):
                found.append(Cuda(load(name)))
            # HIP starts itself when it is asked anything. It has started where the process has its device mapped.
            elif file.startswith("libamdhip64.so") and started:
                found.append(Hip(load(name)))
        except (OSError, AttributeError) as error:  # replaced on disk, or not what its name says
            log.debug("%s is not asked about memory: %s", name, error)
    return found


def _handle(path: str) -> Any:
    # Without this flag, a file that was mapped by other means than the loader would be loaded now.
    return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
