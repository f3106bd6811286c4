"""The frames of a data connection after its set-up. All numbers are little-endian.

A WRITE is a header, three or four parts in one buffer::

    header      magic, mode, count, sequence, room, generation, total
    targets     count × uint64     where each block belongs
    nbytes      count × uint64     how long it is
    sources     count × uint64     where it is in the sender's memory; only in mode COPY

In mode SEND, ``total`` bytes of payload follow. The receiver answers each WRITE with one reply, in order: a header and
the reason.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from statelink.backend import Blocks

    from ._iovec import U64

__all__ = [
    "HEADER",
    "MAX_BLOCKS",
    "MAX_BYTES",
    "MOST_AGAIN",
    "REPLY",
    "BadFrameError",
    "Header",
    "Mode",
    "Reply",
    "Status",
    "check_lengths",
    "pack_reply",
    "pack_write",
    "unpack_header",
    "unpack_reply",
]

HEADER: Final = struct.Struct("<4sBxxxI4xQQQQ")
REPLY: Final = struct.Struct("<4sBxHQ")
WRITE_MAGIC: Final = b"SLw1"
REPLY_MAGIC: Final = b"SLr1"

MAX_BLOCKS: Final = 1 << 15
MAX_BYTES: Final = 1 << 46
"""With `MAX_BLOCKS` of them, sums of lengths stay far below 2^64."""
MAX_REASON: Final = 512
MOST_AGAIN: Final = 32
"""Most batches that are sent again after a connection has ended. A receiver remembers as many that have landed."""


class BadFrameError(ValueError):
    """A frame is malformed or out of bounds."""


class Mode(enum.IntEnum):
    """How the bytes of a batch travel."""

    SEND = 1
    """Behind the header."""
    COPY = 2
    """The receiver reads them from the sender's memory."""


MODES: Final = {mode.value: mode for mode in Mode}


class Status(enum.IntEnum):
    """The result of a batch. After any of these, the batch is neither read nor written."""

    DONE = 1
    """All of it is in place."""
    REFUSED = 2
    """The memory is not granted, or the grant was revoked."""
    FAILED = 3
    """The receiver could not move the bytes."""
    RESEND = 4
    """The receiver cannot read the sender's memory. The sender may send the batch again in mode SEND."""


STATUSES: Final = {status.value: status for status in Status}


class Header(NamedTuple):
    """The head of a WRITE.

    Attributes:
        mode: How its bytes travel.
        blocks: Number of blocks.
        sequence: Number of this batch, greater than those of all earlier ones of its sender.
        room: The request.
        generation: Which use of the room id it is.
        total: Bytes of all blocks.
    """

    mode: Mode
    blocks: int
    sequence: int
    room: int
    generation: int
    total: int

    @property
    def arrays(self) -> int:
        """Number of arrays that follow."""
        return 3 if self.mode is Mode.COPY else 2


class Reply(NamedTuple):
    """The header of a reply. ``length`` bytes of reason follow."""

    status: Status
    sequence: int
    length: int


def pack_write(header: Header, blocks: Blocks) -> bytes:
    """Encode a WRITE without its payload."""
    arrays = [blocks.target, blocks.nbytes, blocks.source][: header.arrays]
    return HEADER.pack(WRITE_MAGIC, *header) + np.concatenate(arrays, dtype="<u8").tobytes()


def unpack_header(raw: bytes | bytearray | memoryview) -> Header:
    """Decode the header of a WRITE.

    Raises:
        BadFrameError: The bytes are no such header.
    """
    magic, number, *numbers = HEADER.unpack(raw)
    mode = MODES.get(number)
    if magic != WRITE_MAGIC or mode is None:
        raise BadFrameError(f"no WRITE starts with {bytes(raw[:8]).hex()}")
    header = Header(mode, *numbers)
    if not 0 < header.blocks <= MAX_BLOCKS or not header.blocks <= header.total <= MAX_BYTES:
        raise BadFrameError(f"a WRITE of {header.blocks} blocks and {header.total} bytes")
    return header


def check_lengths(header: Header, nbytes: U64) -> None:
    """Check that the lengths add up to the header's total.

    Raises:
        BadFrameError: They do not. Then it is unknown where the next frame starts.
    """
    if (
        not np.logical_and.reduce(nbytes)
        or np.maximum.reduce(nbytes) > MAX_BYTES
        or np.add.reduce(nbytes) != header.total
    ):
        raise BadFrameError(f"the blocks of a WRITE do not add up to its {header.total} bytes")


def pack_reply(status: Status, sequence: int, reason: str = "") -> bytes:
    """An answer."""
    raw = reason.encode("utf-8", "replace")[:MAX_REASON] if reason else b""
    return REPLY.pack(REPLY_MAGIC, status, len(raw), sequence) + raw


def unpack_reply(raw: bytes | bytearray | memoryview) -> Reply:
    """Decode the header of a reply.

    Raises:
        BadFrameError: The bytes are no such header.
    """
    magic, number, length, sequence = REPLY.unpack(raw)
    status = STATUSES.get(number)
    if magic != REPLY_MAGIC or status is None or length > MAX_REASON:
        raise BadFrameError(f"no reply starts with {bytes(raw[:8]).hex()}")
    return Reply(status, sequence, length)
