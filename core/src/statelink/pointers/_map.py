"""The process's own memory map: which bytes exist, and how they may be accessed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Mapping", "ProcessMap", "read_map"]

MAPS = Path("/proc/self/maps")


class Mapping(NamedTuple):
    """One line of the map.

    Attributes:
        permissions: Such as ``rw-p``. The last letter is ``s`` if the mapping is shared.
        name: The mapped file, or the kernel's name for the mapping; empty for anonymous memory.
    """

    permissions: str
    name: str

    def __str__(self) -> str:
        return f"{self.permissions} {self.name}".rstrip()


class ProcessMap:
    """The map at the time when it was read. Look-ups use arrays, so that a thousand regions cost as much as one.

    Args:
        text: The text of ``/proc/PID/maps``: ascending, without overlaps.
    """

    def __init__(self, text: str) -> None:
        starts, ends = [], []
        self._lines: list[Mapping] = []
        for line in text.splitlines():
            span, permissions, *rest = line.split(None, 5)
            start, _, end = span.partition("-")
            starts.append(int(start, 16))
            ends.append(int(end, 16))
            self._lines.append(Mapping(permissions, rest[3] if len(rest) > 3 else ""))
        self._starts, self._ends = np.array(starts, np.uint64), np.array(ends, np.uint64)

    @property
    def names(self) -> list[str]:
        """Names of all mappings, without duplicates."""
        return list(dict.fromkeys(line.name for line in self._lines if line.name))

    def at(self, address: int) -> Mapping | None:
        """The mapping at an address."""
        line = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        return self._lines[line] if line >= 0 and address < int(self._ends[line]) else None

    def over(self, address: int, nbytes: int) -> list[Mapping]:
        """All mappings in a range."""
        first = int(np.searchsorted(self._ends, np.uint64(address), side="right"))
        after = int(np.searchsorted(self._starts, np.uint64(address + nbytes - 1), side="right"))
        return self._lines[first:after]

    def reach(self, first: npt.NDArray[np.uint64], permissions: str) -> npt.NDArray[np.uint64]:
        """For each range, the first byte without all of ``permissions``, such as ``rw``.

        Args:
            first: First address of each range.
            permissions: The permissions that every byte needs.

        Returns:
            Addresses. An address is above the last one of its range if the whole range has the permissions.
        """
        fit = np.array([all(word in line.permissions for word in permissions) for line in self._lines], bool)
        starts, ends = self._starts[fit], self._ends[fit]
        # Neighbouring mappings with these permissions are one run, even if they differ in their file.
        begins = np.ones(len(starts), bool)
        begins[1:] = starts[1:] != ends[:-1]
        edges = np.flatnonzero(begins)
        low = np.append(np.uint64(0), starts[edges])
        high = np.append(np.uint64(0), ends[np.append(edges[1:], len(starts)) - 1] if len(edges) else ends)
        reached: npt.NDArray[np.uint64] = high[np.searchsorted(low, first, side="right") - 1]
        return np.maximum(reached, first)


def read_map(path: Path = MAPS) -> ProcessMap | None:
    """Read the map of this process; ``None`` if the platform has none."""
    try:
        return ProcessMap(path.read_text(errors="surrogateescape"))
    except OSError:
        return None
