"""Bytes of an NPU between two processes, whichever of them moves them: blocks that reach beyond their regions, too."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import pytest
from plugins.ascend.tests.peer import MIB, Peer
from tests.helpers import backend_peer

from statelink.errors import TransferError

if TYPE_CHECKING:
    from statelink.backend import Blocks

SIZES = (8 * MIB + 1, 350_001, 8191)
"""Regions on each side, side by side, their borders at odd addresses; the library's pages of 2 MiB hold several."""
NOISE = np.random.default_rng(7).integers(0, 256, 9 * MIB, dtype=np.uint8)


class Pair(NamedTuple):
    """A prefill and a decode, connected."""

    prefill: Peer
    decode: Peer


@pytest.fixture(scope="module")
def pair(make_shared: Callable[..., Peer]) -> Iterator[Pair]:
    both = Pair(make_shared("here", SIZES), make_shared("there", SIZES))
    for peer, role in zip(both, ("prefill", "decode"), strict=True):
        peer.open(role)
    both.decode.connect(both.prefill)
    both.prefill.connect(both.decode)
    yield both
    for peer in both:
        peer.close()
        peer.close()
        assert peer.end()[0] == 0


def scattered(origin: Peer, goal: Peer, count: int, nbytes: int, region: int) -> Blocks:
    """Blocks at unaligned places in random order; they do not overlap at the destination."""
    return backend_peer.scattered(origin.regions, goal.regions, count, nbytes, region)


def check(actor: Peer, blocks: Blocks, other: Peer) -> None:
    """Move blocks, and compare both memories with what numpy makes of them."""
    for number, peer in enumerate((actor, other)):
        peer.memory[:] = NOISE[number : number + len(peer.memory)]
    before, expected = actor.memory.copy(), other.memory.copy()
    first, start = actor.regions[0].address, other.regions[0].address
    for source, target, nbytes in zip(blocks.source, blocks.target, blocks.nbytes.tolist(), strict=True):
        begin, end = int(source) - first, int(target) - start
        expected[end : end + nbytes] = before[begin : begin + nbytes]
    outcomes = actor.move(other, blocks)
    assert outcomes == [(True, "", True)] * len(outcomes)
    assert np.array_equal(other.memory, expected)
    assert np.array_equal(actor.memory, before)


@pytest.mark.parametrize("actor", ["prefill", "decode"])
@pytest.mark.parametrize(("count", "nbytes", "region"), [(1, 4097, 2), (10000, 129, 0)])
def test_scattered_blocks(pair: Pair, actor: str, count: int, nbytes: int, region: int) -> None:
    here, there = pair if actor == "prefill" else pair[::-1]
    check(here, scattered(here, there, count, nbytes, region), there)


@pytest.mark.parametrize("side", ["here", "by the peer"])
@pytest.mark.parametrize("what", ["one past the end", "across a border", "before the start", "nothing"])
def test_blocks_outside_their_region_are_refused(pair: Pair, side: str, what: str) -> None:
    """The library would take most of them, since they lie in its pages of 2 MiB. Nothing of such a batch moves."""
    bad = scattered(*pair, 2, 100, 1)
    regions = pair.prefill.regions if side == "here" else pair.decode.regions
    addresses = bad.source if side == "here" else bad.target
    if what == "nothing":
        bad.nbytes[1] = 0
    addresses[1] = {
        "one past the end": regions[1].address + regions[1].nbytes - 99,
        "across a border": regions[1].address + regions[1].nbytes - 50,
        "before the start": regions[1].address - 1,
        "nothing": regions[1].address,
    }[what]
    before = [peer.memory.copy() for peer in pair]
    whose = "here" if what == "nothing" else side
    with pytest.raises(TransferError, match=rf"a block is outside the memory registered {whose} .*: \d+ bytes at 0x"):
        pair.prefill.move(pair.decode, bad)
    for peer, wanted in zip(pair, before, strict=True):
        assert np.array_equal(peer.memory, wanted)
    check(pair.prefill, scattered(*pair, 5, 100, 1), pair.decode)


def test_unknown_region_or_peer_is_refused(pair: Pair) -> None:
    blocks = scattered(*pair, 2, 100, 1)
    beyond = dataclasses.replace(blocks, target_region=np.array([0, 3], np.uint32))
    with pytest.raises(TransferError, match=r"a block is outside .* by the peer .*: region 3 of 3"):
        pair.prefill.move(pair.decode, beyond)
    with pytest.raises(TransferError, match=r"the peer is not connected .*peer nobody"):
        pair.prefill.move("nobody", blocks)


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
    check(pair.prefill, scattered(*pair, 5, 100, 1), pair.decode)
