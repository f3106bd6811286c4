"""What the plugin makes of its descriptors; that bytes arrive is the conformance kit's business."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from tests.helpers.backend_peer import Pair, connected

from statelink.errors import TransferError
from statelink_mooncake import MooncakeBackend

HERE = MooncakeBackend.probe(MooncakeBackend.Options())
pytestmark = pytest.mark.skipif(not HERE.ok, reason=f"{HERE.reason}; {HERE.hint}")


@pytest.fixture(scope="module")
def world() -> Iterator[Pair]:
    with connected(MooncakeBackend, "default", {}) as pair:
        yield pair
    status, said = pair.peer.end()
    banner = "WARNING: Logging before InitGoogleLogging()"  # it comes before the first error
    assert (status, [line for line in said.splitlines() if banner not in line]) == (0, [])


def test_refused_descriptors(world: Pair) -> None:
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
        world.peer.descriptor: "that of a link called 'there-default'",
        changed(0, 2): "has format 2, this plugin speaks 1",
        changed(2, "example.org"): "has a host that is no address: 'example.org'",
        changed(3, 1 << 16): "has the port 65536",
        good: r"its engine at 127\.0\.0\.1:1 \(mooncake\) does not answer mooncake-transfer-engine",
    }
    for raw, cause in cases.items():
        with pytest.raises(TransferError, match=cause):
            world.backend.connect("stranger", raw, world.peer.regions)
    world.works()
