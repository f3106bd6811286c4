"""What the plugin makes of its descriptors; that bytes arrive is the conformance kit's business."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from statelink.errors import TransferError

if TYPE_CHECKING:
    from plugins.ascend.tests.peer import Peer


class Pair(NamedTuple):
    """A prefill and a decode, connected."""

    prefill: Peer
    decode: Peer


@pytest.fixture(scope="module")
def pair(make_shared: Callable[..., Peer]) -> Iterator[Pair]:
    both = Pair(make_shared("here"), make_shared("there"))
    for peer, role in zip(both, ("prefill", "decode"), strict=True):
        peer.open(role)
    both.decode.connect(both.prefill)
    both.prefill.connect(both.decode)
    yield both
    for peer in both:
        peer.close()
        peer.close()
        assert peer.end()[0] == 0


LINK, HOST, PORT, ROLE, KIND, DOOR = range(1, 7)
"""Fields of a descriptor, after its format."""


def changed(fields: list[object], number: int, value: object) -> bytes:
    return msgspec.msgpack.encode([*fields[:number], value, *fields[number + 1 :]])


def test_descriptor(pair: Pair) -> None:
    found = msgspec.msgpack.decode(pair.decode.descriptor)
    assert (found[LINK], found[ROLE], found[KIND]) == ("there", "Decode", "SDMA")
    assert ipaddress.ip_address(found[HOST]).is_loopback


def test_refused_descriptors(pair: Pair) -> None:
    """Garbage of every kind is refused, and the peers that are connected stay."""
    good = [1, "stranger", "127.0.0.1", 65000, "Decode", "SDMA", 65001]
    cases = {
        b"": "does not decode",
        b"\xff" * 100: "does not decode",
        pair.decode.descriptor[:-1]: "does not decode",
        msgspec.msgpack.encode({"link": "stranger"}): "does not decode",
        msgspec.msgpack.encode([2, "of another shape"]): "has format 2, this plugin speaks 1",
        pair.decode.descriptor: "that of a link called 'there'",
        changed(good, HOST, "nowhere"): "a host that is no address: 'nowhere' does not appear to be",
        changed(good, PORT, 0): "has the port 0",
        changed(good, PORT, 1 << 16): "has the port 65536",
        changed(good, DOOR, 0): "has a door at port 0",
        changed(good, ROLE, "Prefill"): "its role is Prefill, ours is Prefill",
        changed(good, ROLE, "Boss"): "its role is Boss, ours is Prefill",
        changed(good, KIND, "HOST_RDMA"): "moves bytes by HOST_RDMA, we by SDMA",
    }
    for raw, cause in cases.items():
        with pytest.raises(TransferError, match=f"a peer cannot be connected over MemFabric .*{cause}"):
            pair.prefill.meet("stranger", raw, pair.decode.regions)
    pair.prefill.serves(pair.decode)
