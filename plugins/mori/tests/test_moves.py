"""Bytes between regions that lie side by side, and descriptors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.helpers import backend_peer
from tests.helpers.backend_peer import MIB, Pair, connected, move

from statelink.backend import UNKNOWN, Batch, Blocks, Region, pack_descriptors, unpack_descriptors
from statelink.errors import TransferError
from statelink_mori import MoriBackend

LAYOUT = ((2 * MIB + 1, 350_001, 8191), (100_000,))
"""Regions on each side: three side by side, their borders at odd addresses, and one elsewhere."""
NOISE = np.random.default_rng(7).integers(0, 256, 3 * MIB, dtype=np.uint8)


@pytest.fixture(scope="module")
def world(library: None) -> Iterator[Pair]:
    with connected(MoriBackend, "RDMA", {}, LAYOUT, "dram") as pair:
        yield pair
    assert pair.peer.end() == (0, "")


def scattered(world: Pair, count: int, nbytes: int, region: int) -> Blocks:
    """See `backend_peer.scattered`."""
    return backend_peer.scattered(world.memory.regions, world.peer.regions, count, nbytes, region)


def check(world: Pair, blocks: Blocks) -> None:
    """Move blocks, and compare both memories with what numpy makes of them."""
    for number, array in enumerate((*world.memory.arrays, *world.peer.arrays)):
        array[:] = NOISE[number : number + len(array)]
    sides = (world.memory.arrays, world.peer.arrays)
    tables = (world.memory.regions, world.peer.regions)
    expected = [[array.copy() for array in side] for side in sides]
    before = [array.copy() for array in expected[0]]
    for part in (blocks[number : number + 1] for number in range(blocks.count)):
        source, target, nbytes = int(part.source[0]), int(part.target[0]), int(part.nbytes[0])
        from_region, to_region = int(part.source_region[0]), int(part.target_region[0])
        first = source - tables[0][from_region].address
        start = target - tables[1][to_region].address
        expected[1][to_region][start : start + nbytes] = before[from_region][first : first + nbytes]
    transfers = move(world.backend, world.peer.link, blocks)
    assert [transfer.outcome for transfer in transfers] == [(True, "", True)] * len(transfers)
    for side, arrays in zip(sides, expected, strict=True):
        for array, wanted in zip(side, arrays, strict=True):
            assert np.array_equal(array, wanted)


@pytest.mark.parametrize(
    ("count", "nbytes", "region"),
    [(1, 4097, 2), (9000, 129, 0)],
)
def test_scattered_blocks(world: Pair, count: int, nbytes: int, region: int) -> None:
    check(world, scattered(world, count, nbytes, region))


def test_regions_side_by_side(world: Pair) -> None:
    """The last bytes of one region and the first of its neighbour, and one batch over all regions."""
    source, target = world.memory.regions, world.peer.regions
    assert source[0].address + source[0].nbytes == source[1].address
    rows = [
        (source[0].address + source[0].nbytes - 5, target[1].address, 5, 0, 1),
        (source[1].address, target[0].address + target[0].nbytes - 7, 7, 1, 0),
        (source[2].address, target[2].address, 8191, 2, 2),
        (source[3].address + 1, target[3].address + 2, 77_777, 3, 3),
    ]
    table = np.array(rows, np.uint64).T
    check(world, Blocks(table[0], table[1], table[2], *table[3:].astype(np.uint32)))


def test_transport(world: Pair) -> None:
    backend: Any = world.backend
    assert backend.transport(world.peer.link) == "rdma"
    assert backend.transport("nobody") == UNKNOWN


def test_unknown_region_or_peer_is_refused(world: Pair) -> None:
    blocks = scattered(world, 2, 100, 3)
    beyond = dataclasses.replace(blocks, target_region=np.array([0, 4], np.uint32))
    with pytest.raises(TransferError, match=r"outside the memory registered by the peer.*region 4 of 4"):
        world.backend.submit(world.peer.link, Batch(beyond, 1, 1))
    with pytest.raises(TransferError, match=r"the peer is not connected.*peer nobody"):
        world.backend.submit("nobody", Batch(blocks, 1, 1))


def test_contradictory_batches_are_refused(world: Pair) -> None:
    """XGMI would end the process on some of them."""
    blocks = scattered(world, 2, 100, 3)
    for bad in (blocks[:0], dataclasses.replace(blocks, source=blocks.source[:1], source_region=blocks.source_region)):
        with pytest.raises(TransferError, match="a batch is empty, or its columns differ in length"):
            world.backend.submit(world.peer.link, Batch(bad, 1, 1))
    none = dataclasses.replace(blocks, nbytes=np.array([100, 0], np.uint64))
    with pytest.raises(TransferError, match=r"a block is outside the memory registered here.*: 0 bytes at"):
        world.backend.submit(world.peer.link, Batch(none, 1, 1))


def test_refused_descriptors(world: Pair) -> None:
    """Garbage of every kind is refused, and the peers that are connected stay."""
    head, engine, memories = unpack_descriptors(world.peer.descriptor, nested=True)
    name: list[bytes | None] = [head[0], b"stranger", *head[2:]]
    other: list[bytes | None] = [b"other", b"stranger", *head[2:]]
    none: list[bytes | None] = []
    mine = unpack_descriptors(world.backend.descriptor(), nested=True)
    cases: dict[bytes, str] = {
        b"": "not enough values",
        b"\xff" * 100: "malformed list of descriptors",
        pack_descriptors([name, engine, memories])[:-1]: "malformed list of descriptors",
        msgspec.msgpack.encode({"agent": "x"}): "malformed list of descriptors",
        world.peer.descriptor: f"of a link called b'{world.peer.link}'",
        pack_descriptors([other, engine, memories]): "of format b'other'",
        pack_descriptors([name, [*none, b"\xc0"], memories]): r"refused: std::bad_cast",
        pack_descriptors([name, none, memories]): "not enough values",
        pack_descriptors([name, engine, [b"garbage", *memories[1:]]]): r"refused: std::bad_cast",
        pack_descriptors([name, engine, [*none, None, *memories[1:]]]): "incompatible function arguments",
        pack_descriptors([name, engine, memories[1:]]): "its 3 memories are not the 4 regions",
        pack_descriptors([name, engine, memories[::-1]]): "its 4 memories are not the 4 regions",
        pack_descriptors([name, engine, mine[2]]): "its 4 memories are not the 4 regions",
        pack_descriptors([name, mine[1], memories]): "its 4 memories are not the 4 regions",
        pack_descriptors([name, [*none, _elsewhere(engine[0], "example")], memories]): "Expected 4 octets",
        pack_descriptors([name, [*none, _elsewhere(engine[0], "0.0.0.0")], memories]): "0.0.0.0 is nobody's address",
        pack_descriptors([[*name[:3], b"FABRIC"], engine, memories]): "it has FABRIC, we have ",
    }
    for raw, cause in cases.items():
        with pytest.raises(TransferError, match=cause):
            world.backend.connect("stranger", raw, world.peer.regions)
    with pytest.raises(TransferError, match="'npu:0' is unknown to MoRI"):
        world.backend.connect(world.peer.link, world.peer.descriptor, [Region(4096, 1, "npu:0")])
    with pytest.raises(TransferError, match="a link cannot connect to itself"):
        world.backend.connect(world.link, world.backend.descriptor(), world.memory.regions)
    check(world, scattered(world, 5, 100, 3))


def _elsewhere(packed: bytes | None, host: str) -> bytes:
    """An engine's descriptor with a host that the library would take for another."""
    values = msgspec.msgpack.decode(packed or b"")
    values[values.index("127.0.0.1")] = host
    return msgspec.msgpack.encode(values)
