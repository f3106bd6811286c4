"""A port, or a range of ports from which each process of a host takes one."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

__all__ = ["Ports"]

Opened = TypeVar("Opened")

WRITTEN = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


class Ports(NamedTuple):
    """One port, or a range of them: the processes of a host read one configuration, and each takes a port of its own.

    Attributes:
        first: The lowest port; 0 lets the system choose one.
        last: The highest port. It is ``first`` where there is only one.
    """

    first: int
    last: int

    @classmethod
    def read(cls, written: int | str) -> Ports:
        """Read a port such as ``7100``, or a range such as ``7100-7199``.

        Raises:
            ValueError: It is neither.
        """
        read = WRITTEN.fullmatch(str(written))
        first = int(read[1]) if read else -1
        last = int(read[2]) if read and read[2] else first
        if not 0 <= first <= 65535 or last > 65535:
            raise ValueError("a port is between 0 and 65535, and a range is written as 7100-7199")
        if last < first:
            raise ValueError(f"the range of ports begins at {first}, which is above its end, {last}")
        if first == 0 and last > 0:
            raise ValueError("port 0 lets the system choose a port, and so it begins no range")
        return cls(first, last)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.several else str(self.first)

    @property
    def several(self) -> bool:
        """Whether it is a range of more than one port."""
        return self.first < self.last

    def first_free(self, listen: Callable[[int], Opened]) -> Opened:
        """Listen at the lowest port that nobody has.

        Each port is tried by listening there. So two processes that share a range never get the same port.

        Args:
            listen: Listens at a port. If it raises an error whose ``errno`` is ``EADDRINUSE``, the next port is tried.

        Returns:
            What ``listen`` returned. It raises what ``listen`` raised: at once if that is another error, and
            otherwise for the last port.
        """
        for port in range(self.first, self.last):
            try:
                return listen(port)
            except Exception as error:
                if getattr(error, "errno", None) != errno.EADDRINUSE:
                    raise
        return listen(self.last)

    def why(self, error: Exception) -> str:
        """Why nobody can listen at any of the ports, from the error that `first_free` raised."""
        if self.several and getattr(error, "errno", None) == errno.EADDRINUSE:
            return f"every port from {self.first} to {self.last} is in use"
        return str(error)
