"""What the plugin makes of its descriptors; that bytes arrive is the conformance kit's business."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from plugins.nixl.tests.peer import Memory, Peer, make, move

from statelink.backend import Backend, Blocks, Region
from statelink.errors import TransferError
from statelink_nixl._tables import Descriptor

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
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    options = {"ucx": {"TLS": "tcp"}} if request.param == "tcp" else {}
    folder = tmp_path_factory.mktemp(request.param)
    link = f"here-{request.param}"
    peer = Peer(folder / "peer", f"peer-{request.param}", LAYOUT, options)
    backend = make(link, options)
    memory = Memory(folder, LAYOUT)
    backend.register(memory.regions)
    peer.ready()
    peer.invite(link, backend.descriptor(), memory.regions)
    backend.connect(peer.link, peer.descriptor, peer.regions)
    yield World(link, backend, memory, peer)
    backend.close()
    assert peer.end() == 0
    assert peer.log.read_text() == ""


def works(world: World) -> None:
    """A write still arrives; all else about moving bytes is the conformance kit's."""
    world.memory.arrays[3][:100] = NOISE[:100]
    one, zero = np.ones(1, np.uint64), np.full(1, 3, np.uint32)
    start, end = world.memory.regions[3].address, world.peer.regions[3].address
    blocks = Blocks(one * np.uint64(start), one * np.uint64(end), one * np.uint64(100), zero, zero)
    (transfer,) = move(world.backend, world.peer.link, blocks)
    assert transfer.outcome == (True, "", True)
    assert np.array_equal(world.peer.memory.arrays[3][:100], NOISE[:100])


def test_a_peer_that_takes_no_first_write_is_not_connected(world: World) -> None:
    """The library refuses it here, since the peer's scratch is not among what it registered."""
    theirs = Descriptor.decode(world.peer.descriptor, world.peer.link)
    with pytest.raises(TransferError, match=r"cannot be connected over NIXL .*NIXL_ERR_NOT_FOUND"):
        world.backend.connect(world.peer.link, replace(theirs, scratch=4096).encode(), world.peer.regions)
    with pytest.raises(TransferError, match="the peer is not connected"):
        works(world)
    world.backend.connect(world.peer.link, world.peer.descriptor, world.peer.regions)
    works(world)


def test_refused_descriptors(world: World) -> None:
    """Garbage of every kind is refused, and the peers that are connected stay."""
    mine = Descriptor.decode(world.backend.descriptor(), world.link)
    theirs = Descriptor.decode(world.peer.descriptor, world.peer.link)
    good = Descriptor.of("stranger", "nixl", 4096, b"garbage")
    cases = {
        b"": "does not decode",
        b"\xff" * 100: "does not decode",
        good.encode()[:-1]: "does not decode",
        msgspec.msgpack.encode({"link": "x"}): "does not decode",
        world.peer.descriptor: f"that of a link called '{world.peer.link}'",
        replace(good, format=2).encode(): "has format 2, this plugin speaks 1",
        replace(good, scratch=0).encode(): "has the address 0",
        replace(theirs, link="stranger", metadata=theirs.metadata[:200]).encode(): "is damaged",
        good.encode(): "NIXL_ERR_MISMATCH for metadata of nixl; this is nixl-cu",
        Descriptor.of("stranger", "nixl", 4096, b"").encode(): "NIXL_ERR",
        replace(theirs, link="stranger").encode(): f"metadata is that of an agent called '{world.peer.link}'",
        replace(mine, link="stranger").encode(): "NIXL_ERR_INVALID_PARAM",
    }
    for raw, cause in cases.items():
        with pytest.raises(TransferError, match=cause):
            world.backend.connect("stranger", raw, world.peer.regions)
    with pytest.raises(TransferError, match="'npu:0' is unknown to NIXL"):
        world.backend.connect(world.peer.link, world.peer.descriptor, [Region(4096, 1, "npu:0")])
    works(world)
