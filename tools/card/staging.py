"""How fast staging gathers and scatters rows on the card, beside the card's own copy. Needs torch.

python -m tools.card.staging [--mib 64]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

from statelink.plan import Places
from statelink.staged._memory import staging_memory

from .device import Card
from .say import answer

MIB = 1 << 20
WIDTHS = (64, 256, 1024, 4096, 16384, 65536)
ROUNDS = 5


def measure(card: Card, width: int, nbytes: int) -> tuple[float, float]:
    """GB/s of gathering and of scattering rows of one width in random order. The bytes are compared once.

    Raises:
        AssertionError: Other bytes arrived.
    """
    pool, ring = card.buffer(nbytes), staging_memory(card.kind, nbytes)
    data = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    card.write(pool, data)
    rows = np.random.default_rng(2).permutation(nbytes // width)
    tile = Places(np.array([pool.address], np.uint64), rows.astype(np.int64), width)
    found = []
    for copy in (ring.pack, ring.unpack):
        copy([tile], 0)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            copy([tile], 0)
        found.append(nbytes * ROUNDS / (time.perf_counter() - began) / 1e9)
    packed = type(pool)(ring.address, nbytes, ring)
    assert np.array_equal(card.read(packed).reshape(-1, width), data.reshape(-1, width)[rows]), "gathered wrong bytes"
    assert np.array_equal(card.read(pool), data), "scattered wrong bytes"
    return found[0], found[1]


def many(card: Card, buffers: int, width: int, rows: int) -> tuple[float, float, float]:
    """Milliseconds to gather a few rows from each of many buffers, to scatter them, and to make torch's views of them.

    A parcel of a request with many layers is of this kind.
    """
    pools = [card.buffer(width * rows) for _ in range(buffers)]
    ring = staging_memory(card.kind, buffers * width * rows)
    tile = Places(np.array([each.address for each in pools], np.uint64), np.arange(rows, dtype=np.int64), width)

    def views() -> None:
        for each in pools:
            card.torch.as_tensor(_Array(each.address, each.nbytes), device=card.kind)

    found: list[float] = []
    steps: tuple[Callable[[], None], ...] = (lambda: ring.pack([tile], 0), lambda: ring.unpack([tile], 0), views)
    for step in steps:
        step()
        began = time.perf_counter()
        for _ in range(ROUNDS):
            step()
        found.append((time.perf_counter() - began) / ROUNDS * 1e3)
    return found[0], found[1], found[2]


class _Array:
    """Memory of the card, as torch takes it over without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
            "strides": None,
        }


def main() -> int:
    """Measure, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    arguments = parser.parse_args()
    card, nbytes = Card(), arguments.mib * MIB
    if card.torch is None:
        answer("staging on the card", "not asked: torch reaches no card here")
        return 0
    answer(f"copy of {arguments.mib} MiB, card to card", round(card.speed("card to card", nbytes), 1), "GB/s")
    for width in WIDTHS:
        gathered, scattered = measure(card, width, nbytes)
        answer(f"rows of {width} bytes: gather", round(gathered, 2), "GB/s")
        answer(f"rows of {width} bytes: scatter", round(scattered, 2), "GB/s")
    for buffers, width, rows in ((160, 1024, 16), (64, 65536, 1), (1, 65536, 64)):
        what = f"{rows} rows of {width} bytes in each of {buffers} buffers"
        for name, took in zip(("gather", "scatter", "torch's views"), many(card, buffers, width, rows), strict=True):
            answer(f"{what}: {name}", round(took, 3), "ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
