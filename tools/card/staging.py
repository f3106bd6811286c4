"""How fast staging gathers and scatters rows on the card, beside the card's own copy. Needs torch.

python -m tools.card.staging [--mib 64]
"""

from __future__ import annotations

import argparse
import sys
import time

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


def many(card: Card, buffers: int, width: int, rows: int) -> float:
    """Milliseconds to gather a few rows from each of many buffers, as a request of many layers does."""
    pools = [card.buffer(width * rows) for _ in range(buffers)]
    ring = staging_memory(card.kind, buffers * width * rows)
    tile = Places(np.array([each.address for each in pools], np.uint64), np.arange(rows, dtype=np.int64), width)
    ring.pack([tile], 0)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        ring.pack([tile], 0)
    return (time.perf_counter() - began) / ROUNDS * 1e3


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
    answer("gather of 16 rows of 1 KiB from each of 160 buffers", round(many(card, 160, 1024, 16), 2), "ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
