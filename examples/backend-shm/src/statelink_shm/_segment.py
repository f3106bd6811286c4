"""The memory that two processes share, and how blocks pass through it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["DONE", "MAX_BLOCKS", "REFUSED", "Request", "Segment", "Stream"]

U64 = npt.NDArray[np.uint64]

MAX_BLOCKS = 4096
"""Most blocks of one batch: so many rows has the table."""

DONE, REFUSED = b"done", b"refused"
"""The answers to a request."""

TABLE = 16 * MAX_BLOCKS
"""Bytes of the table: target address and length of each block of a batch."""


class Request(NamedTuple):
    """What the sender says once it has filled the segment.

    Attributes:
        room: The request that the bytes belong to.
        generation: Which use of the room id it is.
        blocks: Rows of a new batch in the table; 0 goes on with the last one.
        nbytes: The next bytes of the batch, in the payload.
    """

    room: int
    generation: int
    blocks: int
    nbytes: int

    def encode(self) -> bytes:
        """As bytes."""
        return _REQUEST.pack(*self)

    @classmethod
    def decode(cls, raw: bytes) -> Request:
        """From bytes; `struct.error` where they are none."""
        return cls(*_REQUEST.unpack(raw))


_REQUEST = Struct("<4Q")


class Segment:
    """A table of blocks, and a payload. Nothing of it stays behind, however its processes end: it has no name.

    Args:
        file: Descriptor of the memory; this object owns it.

    Raises:
        OSError, ValueError: It is not such memory.
    """

    def __init__(self, file: int) -> None:
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("it may shrink")
            memory = np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), np.uint8)
        finally:
            os.close(file)  # the mapping keeps the memory
        self.table = memory[:TABLE].view(np.uint64).reshape(MAX_BLOCKS, 2)
        self.payload = memory[TABLE:]
        self.start = int(self.payload.ctypes.data)

    @staticmethod
    def make(nbytes: int) -> int:
        """Memory for a payload of ``nbytes``; its descriptor belongs to the caller."""
        file = os.memfd_create("statelink-shm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, TABLE + nbytes)
        # A peer that could shrink it could crash whoever reads it.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return file

    def gather(self, stream: Stream) -> int:
        """Fill the payload with the next bytes of the blocks; how many."""
        nbytes = 0
        for address, at, part in stream.take(len(self.payload)):
            ctypes.memmove(self.start + at, address, part)
            nbytes += part
        return nbytes

    def scatter(self, stream: Stream, nbytes: int) -> None:
        """Put the next bytes of the blocks from the payload to their places."""
        for address, at, part in stream.take(min(nbytes, len(self.payload))):
            ctypes.memmove(address, self.start + at, part)


class Stream:
    """Blocks of memory as one stream of bytes, taken piece by piece."""

    def __init__(self, addresses: U64, nbytes: U64) -> None:
        self._left = list(zip(addresses.tolist(), nbytes.tolist(), strict=True))[::-1]

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, room: int) -> Iterator[tuple[int, int, int]]:
        """The next ``room`` bytes: address, offset in the piece, and length of each part."""
        at = 0
        while self._left and at < room:
            address, nbytes = self._left.pop()
            part = min(nbytes, room - at)
            if part < nbytes:
                self._left.append((address + part, nbytes - part))
            yield address, at, part
            at += part
