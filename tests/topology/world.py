"""The global state of a small hybrid model, and each rank's share of it by plain numpy slicing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from statelink import state

LAYERS, HEADS, DIM, PAGE = 6, 4, 16, 8
CHANNELS, KERNEL, STATE_HEADS = (16, 16, 32), 3, 4
TOKENS = 75
PAGES, SLOTS = 40, 6
POISON = 0x5A

Array = npt.NDArray[np.uint8]


class Shape(NamedTuple):
    """A parallel layout: TP width and the layers of each pipeline stage."""

    tp: int
    stages: tuple[int, ...] = (LAYERS,)

    @property
    def ranks(self) -> int:
        """Ranks of the instance."""
        return self.tp * len(self.stages)


class Topology(NamedTuple):
    """Who hands over to whom."""

    name: str
    prefill: Shape
    decode: Shape


TOPOLOGIES = (
    Topology("TP 2 to 1", Shape(2), Shape(1)),
    Topology("TP 1 to 2", Shape(1), Shape(2)),
    Topology("TP 4 to 2", Shape(4), Shape(2)),
    Topology("PP 3 to 1, uneven", Shape(1, (1, 3, 2)), Shape(1)),
)


class Rank:
    """One rank's pools, and what of the global state belongs into them."""

    def __init__(self, instance: str, shape: Shape, number: int, room: int) -> None:
        stage, tp = divmod(number, shape.tp)
        first = sum(shape.stages[:stage])
        self.layers = range(first, first + shape.stages[stage])
        self.last = stage == len(shape.stages) - 1
        self.tp, self.width = tp, shape.tp
        rng = np.random.default_rng([number, len(instance), room])
        count = -(-TOKENS // PAGE)
        self.items = {"kv": rng.permutation(PAGES)[:count], "mamba": rng.permutation(SLOTS)[:1]}
        heads, channels = HEADS // shape.tp, sum(CHANNELS) // shape.tp
        self.kv = {n: tuple(_pool(PAGES, PAGE, heads, DIM) for _ in range(2)) for n in self.layers}
        self.conv = {n: _pool(SLOTS, channels, KERNEL) for n in self.layers}
        self.ssm = {n: _pool(SLOTS, STATE_HEADS // shape.tp, 8, 8) for n in self.layers}
        share = (tp, shape.tp)
        parts = [
            state.kv_pages({n: (pair[0], pair[1]) for n, pair in self.kv.items()}, heads=HEADS, tp=share),
            state.mamba_slots(conv=self.conv, ssm=self.ssm, conv_groups=CHANNELS, heads=STATE_HEADS, tp=share),
        ]
        self.row = _pool(SLOTS, 64)
        if self.last:
            parts.append(state.aux_rows({"row": self.row}, replicated=True))
            self.items["aux"] = rng.permutation(SLOTS)[:1]
        self.inventory = state.describe(instance, parts, rank=number, ranks=shape.ranks)

    def places(self, room: int) -> list[tuple[Array, Array, npt.NDArray[np.bool_]]]:
        """Per pool: the pool, what should be in it at every place, and which of its bytes are this request's."""
        found = []
        for layer in self.layers:
            for part in range(2):
                pool = self.kv[layer][part]
                wanted, mine = np.full_like(pool, POISON), np.zeros(pool.shape, np.bool_)
                heads = slice(self.tp * HEADS // self.width, (self.tp + 1) * HEADS // self.width)
                full = _global(room, layer, part, (TOKENS, HEADS, DIM))[:, heads]
                for position in range(TOKENS):
                    place = (self.items["kv"][position // PAGE], position % PAGE)
                    wanted[place], mine[place] = full[position], True
                # The rest of the last page moves along with it, and means nothing.
                found.append((pool, wanted, mine))
            slot = self.items["mamba"][0]
            conv = _global(room, layer, 2, (sum(CHANNELS), KERNEL))
            blocks = np.split(conv, np.cumsum(CHANNELS)[:-1])
            mine_of = [np.split(block, self.width)[self.tp] for block in blocks]
            found.append(_slot(self.conv[layer], slot, np.concatenate(mine_of)))
            ssm = _global(room, layer, 3, (STATE_HEADS, 8, 8))
            found.append(_slot(self.ssm[layer], slot, np.split(ssm, self.width)[self.tp]))
        if self.last:
            found.append(_slot(self.row, self.items["aux"][0], _global(room, 99, 4, (64,))))
        return found

    def fill(self, room: int) -> None:
        """Put this rank's share of a request into its pools."""
        for pool, wanted, mine in self.places(room):
            pool[mine] = wanted[mine]

    def wrong(self, room: int) -> int:
        """Bytes that are not what they should be, and bytes of other pages and slots that were touched."""
        tail = self.items["kv"][-1]
        count = 0
        for pool, wanted, mine in self.places(room):
            count += int((pool[mine] != wanted[mine]).sum())
            others = ~mine
            if pool.ndim == 4 and pool.shape[:2] == (PAGES, PAGE):
                others[tail] = False
            count += int((pool[others] != POISON).sum())
        return count


def _pool(*shape: int) -> Array:
    return np.full(shape, POISON, np.uint8)


def _slot(pool: Array, slot: int, value: Array) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    wanted, mine = np.full_like(pool, POISON), np.zeros(pool.shape, np.bool_)
    wanted[slot], mine[slot] = value, True
    return pool, wanted, mine


def _global(room: int, layer: int, part: int, shape: tuple[int, ...]) -> Array:
    """The whole model's state of a request: the same in every process."""
    return np.random.default_rng([room, layer, part]).integers(0, 256, shape, dtype=np.uint8)
