"""One connection that sends as much as it can: it costs the others no more than their turn, and little memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.helpers import peers
from tests.helpers.links import link_of
from tests.wire.noise import resident

from statelink import Status

if TYPE_CHECKING:
    import statelink

MEGABYTE = 1 << 20
FLOOD = """
import itertools, sys, zmq
import msgspec
from tests.wire.largest import CASES
from tests.helpers.peers import cut
address, kind = sys.argv[1:]
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt_string(zmq.ROUTING_ID, "d#0")
socket.sndhwm = 8
socket.connect(address)
if kind == "nothing":
    messages = [[b"hello", bytes(250_000)], [b"request", bytes(250_000)], [b"x", bytes(250_000)]]
else:
    tree = CASES[kind](4_000_000)
    messages = list(cut([b"hello", msgspec.msgpack.encode(tree)]))
print("ready", flush=True)
for frames in itertools.cycle(messages):
    socket.send_multipart(frames, copy=False)
"""


@contextlib.contextmanager
def flood(address: str, kind: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", FLOOD, address, kind], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == b"ready"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", ["nothing", "hello: 2 slabs", "hello: few pieces"])
def test_deadlines_are_met_beside_a_flood(kind: str) -> None:
    """Of what no peer may send, and of introductions that take long to read."""
    with link_of("prefill") as prefill, link_of("decode") as decode, flood(prefill.address, kind):
        peers.until(lambda: dropped(prefill) > 0 or prefill.snapshot()["load"]["handshakes"] > 0)
        memory = resident()
        late = 0.0
        for number in range(1, 6):
            begun = time.monotonic()
            sending = prefill.send(number, 32, deadline=0.2)
            assert sending.wait(60) is Status.FAILED
            late = max(late, time.monotonic() - begun - 0.2)
        receiving = decode.receive(7, prefill.address, 32, {"kv": [0, 1]}, deadline=60)
        sending = prefill.send(7, 32, deadline=60)
        sending.push({"kv": [0, 1]})
        assert receiving.wait(60) is Status.SUCCEEDED
        assert late < 3, "a turn takes hundredths of a second"
        assert resident() - memory < 256 * MEGABYTE


def dropped(link: statelink.Link) -> int:
    return sum(link.snapshot()["dropped_frames"].values())
