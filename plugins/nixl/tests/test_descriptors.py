"""What the plugin makes of its descriptors; that bytes arrive is the conformance kit's business."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.helpers.backend_peer import Pair, connected

from statelink.backend import Region
from statelink.errors import TransferError
from statelink_nixl import NixlBackend

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl"
)


@pytest.fixture(scope="module", params=["default", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[Pair]:
    options = {"ucx": {"TLS": "tcp"}} if request.param == "tcp" else {}
    with connected(NixlBackend, request.param, options) as pair:
        yield pair
    assert pair.peer.end() == (0, "")


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


def test_a_peer_that_takes_no_first_write_is_not_connected(world: Pair) -> None:
    """The library refuses it here, since the peer's scratch is not among what it registered."""
    raw = changed(world.peer.descriptor, {SCRATCH: 4096})
    with pytest.raises(TransferError, match=r"cannot be connected over NIXL .*NIXL_ERR_NOT_FOUND"):
        world.backend.connect(world.peer.link, raw, world.peer.regions)
    with pytest.raises(TransferError, match="the peer is not connected"):
        world.works()
    world.backend.connect(world.peer.link, world.peer.descriptor, world.peer.regions)
    world.works()


def test_refused_descriptors(world: Pair) -> None:
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
        changed(theirs, {METADATA: whole[METADATA][:-1], CHECKSUM: whole[CHECKSUM]}): "is damaged",
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
    world.works()
