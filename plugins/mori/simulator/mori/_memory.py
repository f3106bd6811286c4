"""What an engine has registered, where the NIC of another process finds it without asking anyone."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import _host

MOST = 1 << 14
_KEPT: list[Table] = []
"""For ever: other processes may look at them."""


class Table:
    """A nonce, whether the engine lives, and address and size of each memory, by its id."""

    def __init__(self) -> None:
        self._words = np.zeros(3 + 2 * MOST, np.uint64)
        self.nonce = secrets.token_bytes(16)
        self._words[:2] = np.frombuffer(self.nonce, np.uint64)
        self._words[2] = 1
        self._file = -1
        _KEPT.append(self)

    @property
    def place(self) -> Place:
        return Place(os.getpid(), self._words.ctypes.data, self.nonce)

    def put(self, number: int, address: int, size: int) -> None:
        self._words[3 + 2 * number : 5 + 2 * number] = address, size

    def get(self, number: int) -> tuple[int, int]:
        address, size = self._words[3 + 2 * number : 5 + 2 * number].tolist()
        return address, size

    def publish(self, port: int) -> None:
        """Let other processes find it without a word of our Python: a thread of the library's would tell them."""
        self._file = os.memfd_create(f"mori-{port}")
        os.write(self._file, struct.pack("<QQ16s", *self.place))

    def end(self) -> None:
        self._words[2:] = 0
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Place(NamedTuple):
    """Where a table is, from any process."""

    pid: int
    address: int
    nonce: bytes

    def alive(self) -> bool:
        """Whether the engine of then is still there."""
        return _host.read(self.pid, self.address, 24) == self.nonce + struct.pack("<Q", 1)

    def get(self, number: int) -> tuple[int, int]:
        """Address and size of a memory; zeros, if it is not registered any more."""
        raw = _host.read(self.pid, self.address + 24 + 16 * number, 16) if 0 <= number < MOST else b""
        address, size = struct.unpack("<QQ", raw) if raw else (0, 0)
        return address, size

    def handle(self) -> bytes:
        """As the 64 bytes of an IPC handle."""
        return struct.pack("<QQ16s32x", self.pid, self.address, self.nonce)

    @classmethod
    def of(cls, handle: bytes) -> Place:
        return cls(*struct.unpack("<QQ16s32x", handle))

    @classmethod
    def published(cls, pid: int, port: int) -> Place | None:
        """The table of the engine at a port of a process; none while the process is stopped, or where there is none."""
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                return None
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(each).startswith(f"/memfd:mori-{port} "):
                        return cls(*struct.unpack("<QQ16s", each.read_bytes()))
        except OSError:
            return None
        return None
