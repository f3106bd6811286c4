"""Strategies that are wrong, each in one way and for one state type, and otherwise the direct one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from statelink import hookimpl
from statelink.backend import Blocks, Move, ReceiveHook, SendHook, Strategy


class Wrong(Strategy):
    """The direct strategy; what is wrong is in its methods."""

    def __init__(self, name: str) -> None:
        self.name = name

    def blocks(self, move: Move) -> Iterable[Blocks | None]:
        return move.blocks()

    def told(self, payload: bytes) -> None:
        raise NotImplementedError

    def sender(self) -> SendHook:
        strategy = self

        class Send(SendHook):
            def blocks(self, context: Any, move: Move) -> Iterable[Blocks | None]:
                return strategy.blocks(move)

            def message(self, context: Any, payload: bytes) -> None:
                strategy.told(payload)

        return Send()

    def receiver(self) -> ReceiveHook:
        class Receive(ReceiveHook):
            def prepare(self, context: Any) -> bytes:
                return b""

        return Receive()


class Half(Wrong):
    def blocks(self, move: Move) -> Iterable[Blocks | None]:
        return list(move.blocks(1))[::2]


class Twice(Wrong):
    """As many bytes as are planned, some of them twice."""

    def blocks(self, move: Move) -> Iterable[Blocks | None]:
        blocks = list(move.blocks(1))
        last = blocks[-1].nbytes[0]
        same = [n for n, each in enumerate(blocks[:-1]) if each.nbytes[0] == last]
        return [*blocks[:-1], blocks[same[0]]]


class Elsewhere(Wrong):
    """Every byte, and two blocks of them the wrong way round."""

    def blocks(self, move: Move) -> Iterable[Blocks | None]:
        blocks, *others = move.blocks()
        at = np.flatnonzero(blocks.nbytes == blocks.nbytes[0])[:2]
        blocks.source[at] = blocks.source[at[::-1]]
        blocks.source_region[at] = blocks.source_region[at[::-1]]
        return [blocks, *others]


class Waits(Wrong):
    def blocks(self, move: Move) -> Iterable[Blocks | None]:
        while True:
            yield None


class Trusting(Wrong):
    """Takes for text whatever a peer says."""

    def told(self, payload: bytes) -> None:
        payload.decode("ascii")


class Lossy(Wrong):
    """Says that its receive hook sees to it that everything has come, which does not."""

    def blocks(self, move: Move) -> Iterable[Blocks | None]:
        return []

    def receiver(self) -> ReceiveHook:
        made = super().receiver()
        made.in_place = False
        return made


WRONG: dict[str, Strategy] = {
    "minimax_index_k": Half("half"),
    "minimax_dense_kv": Twice("twice"),
    "block_scale": Elsewhere("elsewhere"),
    "dsa": Waits("waits"),
    "dsv4": Trusting("trusting"),
    "qsa_compressed": Lossy("lossy"),
}
"""State type to the strategy that carries it."""


@hookimpl
def statelink_strategy(backend: str, state_type: str) -> Strategy | None:
    """What carries a state type over ``tcp``."""
    return WRONG.get(state_type) if backend == "tcp" else None
