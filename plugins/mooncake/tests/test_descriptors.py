"""What the plugin makes of its descriptors; that bytes arrive is the conformance kit's business."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from plugins.mooncake.tests.peer import Memory, Peer, make, move

from statelink.backend import Backend, Blocks
from statelink.errors import TransferError
from statelink_mooncake import MooncakeBackend

HERE = MooncakeBackend.probe(MooncakeBackend.Options())
pytestmark = pytest.mark.skipif(not HERE.ok, reason=f"{HERE.reason}; {HERE.hint}")

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


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    peer = Peer("there", LAYOUT)
    backend = make("here")
    memory = Memory(LAYOUT)
    backend.register(memory.regions)
    peer.ready()
    peer.meet("here", backend.descriptor(), memory.regions)
    backend.connect(peer.link, peer.descriptor, peer.regions)
    yield World("here", backend, memory, peer)
    backend.close()
    assert peer.complaints() == []


def works(world: World) -> None:
    """A write still arrives; all else about moving bytes is the conformance kit's."""
    world.memory.arrays[3][:100] = NOISE[:100]
    one, zero = np.ones(1, np.uint64), np.full(1, 3, np.uint32)
    start, end = world.memory.regions[3].address, world.peer.regions[3].address
    blocks = Blocks(one * np.uint64(start), one * np.uint64(end), one * np.uint64(100), zero, zero)
    (transfer,) = move(world.backend, world.peer.link, blocks)
    assert transfer.outcome == (True, "", True)
    assert np.array_equal(world.peer.arrays[3][:100], NOISE[:100])


def test_refused_descriptors(world: World) -> None:
    """Garbage of every kind is refused, and the peers that are connected stay."""
    fields = [1, "stranger", "127.0.0.1", 1, "mooncake"]

    def changed(number: int, value: object) -> bytes:
        return msgspec.msgpack.encode([*fields[:number], value, *fields[number + 1 :]])

    good = msgspec.msgpack.encode(fields)
    cases = {
        b"": "does not decode",
        b"\xff" * 100: "does not decode",
        good[:-1]: "does not decode",
        msgspec.msgpack.encode({"link": "x"}): "does not decode",
        world.peer.descriptor: "that of a link called 'there'",
        changed(0, 2): "has format 2, this plugin speaks 1",
        changed(2, "example.org"): "has a host that is no address: 'example.org'",
        changed(3, 1 << 16): "has the port 65536",
        good: r"its engine at 127\.0\.0\.1:1 \(mooncake\) does not answer mooncake-transfer-engine",
    }
    for raw, cause in cases.items():
        with pytest.raises(TransferError, match=cause):
            world.backend.connect("stranger", raw, world.peer.regions)
    works(world)
