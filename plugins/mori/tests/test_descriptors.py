"""What the plugin makes of its descriptors; that bytes arrive is the conformance kit's business."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.helpers.backend_peer import MIB, Pair, connected

from statelink.backend import UNKNOWN, Region, pack_descriptors, unpack_descriptors
from statelink.errors import TransferError
from statelink_mori import MoriBackend

LAYOUT = ((2 * MIB + 1, 350_001, 8191), (100_000,))
"""Regions on each side: three side by side, and one elsewhere."""


@pytest.fixture(scope="module")
def world(library: None) -> Iterator[Pair]:
    with connected(MoriBackend, "RDMA", {}, LAYOUT) as pair:
        yield pair
    assert pair.peer.end() == (0, "")


def test_transport(world: Pair) -> None:
    backend: Any = world.backend
    assert backend.transport(world.peer.link) == "rdma"
    assert backend.transport("nobody") == UNKNOWN


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
    world.works()


def _elsewhere(packed: bytes | None, host: str) -> bytes:
    """An engine's descriptor with a host that the library would take for another."""
    values = msgspec.msgpack.decode(packed or b"")
    values[values.index("127.0.0.1")] = host
    return msgspec.msgpack.encode(values)
