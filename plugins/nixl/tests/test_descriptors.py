"""What the plugin makes of its descriptors; that bytes arrive is the conformance kit's business."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from plugins.nixl.tests.peer import Memory, Peer, make, move

from statelink.backend import Backend, Blocks, Region
from statelink.errors import TransferError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl"
)

MIB = 1 << 20
LAYOUT = ((8 * MIB + 1, 350_001, 8191), (100_000,))
"""Regions on each side: three side by side, their borders at odd addresses, and one elsewhere."""


NOISE = np.random.default_rng(7).integers(0, 256, 9 * MIB, dtype=np.uint8)


class World(NamedTuple):
    """This process and another, connected."""

    link: str
    backend: Backend
    memory: Memory
    peer: Peer


@pytest.fixture(scope="module", params=["default", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    options = {"ucx": {"TLS": "tcp"}} if request.param == "tcp" else {}
    link = f"here-{request.param}"
    peer = Peer(f"peer-{request.param}", LAYOUT, options)
    backend = make(link, options)
    memory = Memory(LAYOUT)
    backend.register(memory.regions)
    peer.ready()
    peer.meet(link, backend.descriptor(), memory.regions)
    backend.connect(peer.link, peer.descriptor, peer.regions)
    yield World(link, backend, memory, peer)
    backend.close()
    assert peer.end() == (0, "")


def works(world: World) -> None:
    """A write still arrives; all else about moving bytes is the conformance kit's."""
    world.memory.arrays[3][:100] = NOISE[:100]
    one, zero = np.ones(1, np.uint64), np.full(1, 3, np.uint32)
    start, end = world.memory.regions[3].address, world.peer.regions[3].address
    blocks = Blocks(one * np.uint64(start), one * np.uint64(end), one * np.uint64(100), zero, zero)
    (transfer,) = move(world.backend, world.peer.link, blocks)
    assert transfer.outcome == (True, "", True)
    assert np.array_equal(world.peer.arrays[3][:100], NOISE[:100])


FORMAT, LINK, LIBRARY, SCRATCH, METADATA, CHECKSUM = range(6)
"""Fields of a descriptor, in their order."""


def changed(raw: bytes, fields: dict[int, Any]) -> bytes:
    """A descriptor with other fields, and the checksum of its metadata where only these are given."""
    found = msgspec.msgpack.decode(raw)
    for number, value in fields.items():
        found[number] = value
    if METADATA in fields and CHECKSUM not in fields:
        found[CHECKSUM] = hashlib.blake2b(fields[METADATA], digest_size=16).digest()
    return msgspec.msgpack.encode(found)


def test_a_peer_that_takes_no_first_write_is_not_connected(world: World) -> None:
    """The library refuses it here, since the peer's scratch is not among what it registered."""
    raw = changed(world.peer.descriptor, {SCRATCH: 4096})
    with pytest.raises(TransferError, match=r"cannot be connected over NIXL .*NIXL_ERR_NOT_FOUND"):
        world.backend.connect(world.peer.link, raw, world.peer.regions)
    with pytest.raises(TransferError, match="the peer is not connected"):
        works(world)
    world.backend.connect(world.peer.link, world.peer.descriptor, world.peer.regions)
    works(world)


def test_refused_descriptors(world: World) -> None:
    """Garbage of every kind is refused, and the peers that are connected stay."""
    theirs = changed(world.peer.descriptor, {LINK: "stranger"})
    good = changed(theirs, {LIBRARY: "nixl", SCRATCH: 4096, METADATA: b"garbage"})
    whole: list[bytes] = msgspec.msgpack.decode(theirs)
    cases = {
        b"": "does not decode",
        b"\xff" * 100: "does not decode",
        good[:-1]: "does not decode",
        msgspec.msgpack.encode({"link": "x"}): "does not decode",
        world.peer.descriptor: f"that of a link called '{world.peer.link}'",
        changed(good, {FORMAT: 2}): "has format 2, this plugin speaks 1",
        changed(good, {SCRATCH: 0}): "has the address 0",
        changed(theirs, {METADATA: whole[METADATA][:200], CHECKSUM: whole[CHECKSUM]}): "is damaged",
        good: "NIXL_ERR_MISMATCH for metadata of nixl; this is nixl-cu",
        changed(good, {METADATA: b""}): "NIXL_ERR",
        theirs: f"metadata is that of an agent called '{world.peer.link}'",
        changed(world.backend.descriptor(), {LINK: "stranger"}): "NIXL_ERR_INVALID_PARAM",
    }
    for raw, cause in cases.items():
        with pytest.raises(TransferError, match=cause):
            world.backend.connect("stranger", raw, world.peer.regions)
    with pytest.raises(TransferError, match="'npu:0' is unknown to NIXL"):
        world.backend.connect(world.peer.link, world.peer.descriptor, [Region(4096, 1, "npu:0")])
    works(world)
