"""`RegionTable.check` against whole-number arithmetic, for few blocks, and for many, which it takes part by part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelink.backend import Region, RegionTable
from statelink.errors import TransferError

TABLE = [
    Region(1 << 40, 1 << 20),
    Region((1 << 40) + (1 << 20), 1 << 12),
    Region(1 << 16, 1),
    Region((1 << 64) - 4097, 4096),
]
DAMAGES = ("none", "below", "beyond", "empty", "long", "wraps", "next region", "no region")


def lies_inside(address: int, nbytes: int, region: int) -> bool:
    """The rule, in numbers that do not wrap around."""
    if not 0 <= region < len(TABLE) or not nbytes:
        return False
    start = TABLE[region].address
    return start <= address and address + nbytes <= start + TABLE[region].nbytes


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_says_what_whole_numbers_say(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    runs = data.draw(st.integers(1, 6))
    a_run = data.draw(st.sampled_from((1, 7, 400, 3000)))
    regions = np.repeat(rng.integers(0, len(TABLE), runs), a_run)
    sizes = np.array([each.nbytes for each in TABLE], np.int64)[regions]
    nbytes = rng.integers(1, np.minimum(sizes, 4096) + 1)
    offsets = rng.integers(0, sizes - nbytes + 1)
    addresses = np.array([each.address for each in TABLE], np.uint64)[regions] + offsets.astype(np.uint64)
    lengths, named = nbytes.astype(np.uint64), regions.astype(np.uint32)
    at, damage = int(rng.integers(len(named))), data.draw(st.sampled_from(DAMAGES))
    mine = TABLE[named[at]]
    if damage == "below":
        addresses[at] = mine.address - 1
    elif damage == "beyond":
        addresses[at] = mine.address + mine.nbytes - int(lengths[at]) + 1
    elif damage == "empty":
        lengths[at] = 0
    elif damage == "long":
        lengths[at] = mine.nbytes + 1
    elif damage == "wraps":
        lengths[at] = (1 << 64) - int(addresses[at]) + 5
    elif damage == "next region":
        addresses[at], named[at] = TABLE[0].address + TABLE[0].nbytes - 1, 0
        lengths[at] = 2  # the next region begins there, and yet it is another registration
    elif damage == "no region":
        named[at] = len(TABLE)
    columns = addresses.tolist(), lengths.tolist(), named.tolist()
    inside = all(map(lies_inside, *columns))
    assert inside == (damage == "none")
    table = RegionTable(TABLE, "acme")
    if inside:
        table.check("here", addresses, lengths, named)
        return
    with pytest.raises(TransferError, match="registered here") as caught:
        table.check("here", addresses, lengths, named)
    assert damage == "no region" or hex(columns[0][at]) in str(caught.value)


@pytest.mark.parametrize("damaged", [0, 4096, 8191])
def test_names_the_block_among_many(damaged: int) -> None:
    addresses = np.arange(8192, dtype=np.uint64) * np.uint64(16) + np.uint64(TABLE[0].address)
    nbytes, regions = np.full(8192, 16, np.uint64), np.zeros(8192, np.uint32)
    RegionTable(TABLE, "acme").check("here", addresses, nbytes, regions)
    addresses[damaged] += np.uint64(1 << 21)
    with pytest.raises(TransferError, match=hex(int(addresses[damaged]))):
        RegionTable(TABLE, "acme").check("here", addresses, nbytes, regions)
