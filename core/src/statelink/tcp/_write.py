"""One batch on its way to a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from statelink.backend import Batch, Transfer

from ._frames import Header, Mode, pack_write
from ._iovec import MOST_PROMPT_BYTES, Vectors

if TYPE_CHECKING:
    from ._stream import Stream

__all__ = ["Write"]

SLICE: Final = 4 << 20
"""Most bytes that are offered to the socket in one call."""


class Write(Transfer):
    """One submitted batch and its progress. Once it is queued, only its sender uses it, in one's turn."""

    __slots__ = ("_batch", "_frame", "_position", "_total", "_vectors", "mode", "sequence")

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.mode = Mode.SEND
        self.sequence = 0
        self._batch: Batch | None = batch
        self._frame = b""
        self._vectors: Vectors | None = None
        """What to send, if it is more than a small frame."""
        self._position = 0
        self._total = 0

    def begin(self, mode: Mode) -> None:
        """Make what to send: the frame with `sequence`, and in mode SEND the payload."""
        assert self._batch is not None
        blocks = self._batch.blocks
        nbytes = int(np.add.reduce(blocks.nbytes))
        header = Header(mode, len(blocks.nbytes), self.sequence, self._batch.room, self._batch.generation, nbytes)
        self._frame = frame = pack_write(header, blocks)
        self._vectors, self._total = None, len(frame)
        if mode is Mode.SEND or len(frame) > MOST_PROMPT_BYTES:
            addresses = np.array([np.frombuffer(frame, np.uint8).ctypes.data], np.uint64)
            lengths = np.array([len(frame)], np.uint64)
            if mode is Mode.SEND:
                addresses = np.concatenate((addresses, blocks.source))
                lengths = np.concatenate((lengths, blocks.nbytes))
            self._vectors = Vectors(addresses, lengths)
            self._total = self._vectors.total
        self.mode = mode
        self._position = 0

    def send(self, stream: Stream) -> bool:
        """Send what the socket takes. Return whether it took anything."""
        if self._vectors is not None:
            sent = stream.send_vectors(self._vectors, self._position, SLICE)
        else:
            sent = stream.send(memoryview(self._frame)[self._position :] if self._position else self._frame)
        self._position += sent
        return sent > 0

    @property
    def sent(self) -> bool:
        """Whether everything has been sent."""
        return self._total > 0 and self._position == self._total

    @property
    def exposed(self) -> bool:
        """Whether enough was sent for the receiver to read or write some of its bytes."""
        return self._total > 0 and self._position >= len(self._frame)

    def release(self) -> None:
        """Free the arrays. The core may keep the transfer itself."""
        self._batch = self._vectors = None
        self._frame, self._total = b"", 0
