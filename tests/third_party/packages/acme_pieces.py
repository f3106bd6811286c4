"""What a third party's package looks like that replaces one cell of one backend's table, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from statelink import hookimpl
from statelink.backend import Blocks, HookContext, Move, ReceiveHook, SendHook, Strategy

LARGEST = int(os.environ.get("ACME_LARGEST", 65536))
"""Most bytes of one block, where this process receives."""


class Receive(ReceiveHook):
    """The decode side says how large a block may be."""

    def prepare(self, context: HookContext) -> bytes:
        return LARGEST.to_bytes(8, "little")


class Send(SendHook):
    """The prefill side keeps to it."""

    def open(self, context: HookContext, prepared: bytes) -> None:
        self.largest = min(max(16, int.from_bytes(prepared, "little")), 1 << 40)

    def blocks(self, context: HookContext, move: Move) -> Iterator[Blocks]:
        for blocks in move.blocks(1024):
            yield from cut(blocks, self.largest).slices(16384, 64 << 20)


class Pieces(Strategy):
    """One-sided moves of blocks that are cut, for a network that likes them small."""

    name = "acme.pieces"

    def sender(self) -> SendHook:
        return Send()

    def receiver(self) -> ReceiveHook:
        return Receive()


def cut(blocks: Blocks, largest: int) -> Blocks:
    """The same bytes in blocks of at most ``largest``."""
    size = np.uint64(largest)
    pieces = ((blocks.nbytes + size - np.uint64(1)) // size).astype(np.int64)
    block = np.repeat(np.arange(blocks.count), pieces)
    number = np.arange(len(block)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number.astype(np.uint64) * size
    return Blocks(
        blocks.source[block] + offset,
        blocks.target[block] + offset,
        np.minimum(blocks.nbytes[block] - offset, size),
        blocks.source_region[block],
        blocks.target_region[block],
    )


@hookimpl
def statelink_strategy(backend: str, state_type: str) -> Strategy | None:
    """One cell: what carries ``kv`` over ``tcp``. ``None`` leaves every other as it is."""
    return Pieces() if (backend, state_type) == ("tcp", "kv") else None
