"""What goes wrong between two servers, and what must come of it: SGLang's real pools, and processes for both sides.

Every row has the right outcome: the request fails on both sides with the reason, or all of its bytes are where they
belong, and the next request succeeds. docs/comparison.md has what SGLang's own connectors do.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from engine_processes import free_port
from support.process import CONFIG, FAILED, IMPATIENT, START, WAITING, Host, N, Pair, Process, rooms

from statelink.errors import StatelinkError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)

SWA = {"kind": "swa", "window": 128}
HYBRID = {"kind": "hybrid"}


class Two(NamedTuple):
    """Two processes, prefill and decode, in which pairs are made."""

    prefill: Process
    decode: Process

    def pair(self, prefill: dict[str, Any], decode: dict[str, Any] | None = None, **config: Any) -> Pair:
        """A rank in each process. Where the sides differ, prefill waits a few seconds for a request, not minutes."""
        limits = {} if decode is None else {"timeouts": IMPATIENT}
        key, port = f"pair-{next(rooms)}", free_port()
        self.prefill.start(Host.start, key, ("support.pools", "make", prefill), port, {**CONFIG, **config}, **limits)
        self.decode.start(Host.start, key, ("support.pools", "make", decode or prefill), port, {**CONFIG, **config})
        for process in (self.prefill, self.decode):
            process.result()
        made_pair = Pair(self.prefill, self.decode, key)
        made_pair.on(self.prefill, "fill", 1)
        made_pair.on(self.decode, "meet")
        return made_pair


@pytest.fixture(scope="module")
def two(llama: Path) -> Iterator[Two]:
    with Process("prefill") as prefill, Process("decode") as decode:
        for process in (prefill, decode):
            process.start(Host.publish, process.name, "statelink", str(llama))
        for process in (prefill, decode):
            process.result(START)
        yield Two(prefill, decode)


@pytest.fixture(scope="module")
def windowed(two: Two) -> Pair:
    return two.pair(SWA)


@pytest.fixture(scope="module")
def hybrid(two: Two) -> Pair:
    return two.pair(HYBRID)


def _refused(process: Process, made: dict[str, Any], spoil: str) -> str:
    """Why a rank does not start."""
    with pytest.raises(StatelinkError) as caught:
        process(Host.start, "refused", ("support.pools", "make", made), free_port(), CONFIG, spoil=spoil)
    return str(caught.value)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_unknown_state_type(two: Two, hybrid: Pair, role: str) -> None:
    said = _refused(getattr(two, role), HYBRID, "fresh_state")
    assert "state of the type 'fresh_state' is not supported" in said
    hybrid.ordinary()


def test_decode_offers_12_pages_for_16(hybrid: Pair) -> None:
    room = next(rooms)
    hybrid.open(room)
    hybrid.on(hybrid.decode, "name", room, pages=12)
    hybrid.fails(room, r"12 items of component 'kv'.*need 16 pages of 16 tokens")
    hybrid.ordinary()


def test_prefill_sends_12_pages_of_16(hybrid: Pair) -> None:
    room = next(rooms)
    hybrid.open(room)
    hybrid.on(hybrid.decode, "name", room)
    hybrid.on(hybrid.prefill, "reach", room, WAITING)
    hybrid.on(hybrid.prefill, "send", room, pages=12)
    hybrid.fails(room, "12 of 16 pages")
    hybrid.ordinary()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_windows_of_8_and_5_pages(windowed: Pair, role: str) -> None:
    room = next(rooms)
    windowed.open(room)
    windowed.on(windowed.decode, "name", room, **({"window": 5} if role == "decode" else {}))
    if role == "prefill":
        windowed.on(windowed.prefill, "reach", room, WAITING)
        windowed.on(windowed.prefill, "send", room, 128, window=5)
    windowed.fails(room, r"5 items of component 'swa'")
    windowed.ordinary()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_two_mamba_indices(hybrid: Pair, role: str) -> None:
    room = next(rooms)
    hybrid.open(room)
    hybrid.on(hybrid.decode, "name", room, **({"slots": 2} if role == "decode" else {}))
    if role == "prefill":
        hybrid.on(hybrid.prefill, "reach", room, WAITING)
        hybrid.on(hybrid.prefill, "send", room, slots=2)
    hybrid.fails(room, r"2 items of component 'mamba'")
    hybrid.ordinary()


def test_decode_has_other_mamba_slots(two: Two, hybrid: Pair) -> None:
    """SGLang's pools have no gaps between slots: another stride is another shape."""
    assert "of 'mamba'" in _refused(two.decode, HYBRID, "wider_slots")
    pair = two.pair(HYBRID, {**HYBRID, "state": 16})
    room = next(rooms)
    pair.open(room)
    pair.on(pair.decode, "name", room)
    reason = pair.fails_on_decode(room)
    assert re.search(r"mamba/.*ssm: extent of axis .*: \d+ on decode, \d+ on prefill", reason), reason
    hybrid.ordinary()


def test_pages_of_keys_are_smaller_than_those_of_values(two: Two) -> None:
    pair = two.pair({**SWA, "values": 16})
    for prefix in (0, 64, 240):
        pair.ordinary(prefix)


def test_decode_lists_fewer_buffers(two: Two, hybrid: Pair) -> None:
    assert re.search("only the pools describe .* of 'kv'", _refused(two.decode, HYBRID, "fewer_buffers"))
    pair = two.pair({"kind": "mha"}, {"kind": "mha", "layers": 1})
    room = next(rooms)
    pair.open(room)
    pair.on(pair.decode, "name", room)
    reason = pair.fails_on_decode(room)
    assert "model" in reason or "absent on decode, present on prefill" in reason, reason
    hybrid.ordinary()


@pytest.mark.parametrize(("role", "port"), [("prefill", "link"), ("prefill", "bootstrap"), ("decode", "link")])
def test_garbage_to_a_port(hybrid: Pair, role: str, port: str) -> None:
    process: Process = getattr(hybrid, role)
    address = hybrid.on(process, "ports")[port].partition("@")[0].removeprefix("tcp://")
    host, _, number = address.rpartition(":")
    room = next(rooms)
    hybrid.on(hybrid.decode, "wipe")
    hybrid.open(room)  # it is under way meanwhile
    request = b"PUT /statelink HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
    for raw in (b"hello\n", b"GET / HTTP/1.1\r\n\r\n", request + b"\xff" * 9, bytes(range(256)) * 64):
        with socket.create_connection((host, int(number)), timeout=10) as sock:
            sock.sendall(raw)
    hybrid.on(hybrid.decode, "name", room)
    assert hybrid.on(hybrid.prefill, "reach", room, WAITING)[-1] == WAITING
    hybrid.on(hybrid.prefill, "send", room, 128)
    hybrid.succeeds(room)
    hybrid.ordinary()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_prefill_sends_before_decode_has_named_its_memory(hybrid: Pair, first: str) -> None:
    """SGLang's scheduler never does. The request fails at once on both sides, instead of losing a chunk."""
    room = next(rooms)
    hybrid.on(getattr(hybrid, first), "open", room, N)
    if first == "decode":
        hybrid.on(hybrid.prefill, "open", room, N)
    hybrid.on(hybrid.prefill, "begin", room)
    hybrid.on(hybrid.prefill, "chunk", room, 0, 128)
    if first == "prefill":
        hybrid.on(hybrid.decode, "open", room, N)
    hybrid.on(hybrid.decode, "name", room)
    hybrid.on(hybrid.prefill, "chunk", room, 128, N)
    hybrid.fails(room, "decode has not named its memory")
    hybrid.ordinary()


def test_requests_meet_in_either_order(hybrid: Pair) -> None:
    for first, second in (("prefill", "decode"), ("decode", "prefill")):
        room = next(rooms)
        hybrid.on(hybrid.decode, "wipe")
        for role in (first, second):
            hybrid.on(getattr(hybrid, role), "open", room, N)
            if role == "decode":
                hybrid.on(hybrid.decode, "name", room)
        assert hybrid.on(hybrid.prefill, "reach", room, WAITING)[-1] == WAITING
        hybrid.on(hybrid.prefill, "send", room, 128)
        hybrid.succeeds(room)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("refuse", "the transport refused: ENOBUFS|ENOBUFS"), ("fail", "the transport failed: EIO")],
)
def test_transport_refuses_one_batch(two: Two, fault: str, said: str) -> None:
    pair = two.pair(HYBRID, backend="faulty-tcp")
    pair.ordinary()
    room = next(rooms)
    pair.open(room)
    pair.on(pair.decode, "name", room)
    pair.on(pair.prefill, "reach", room, WAITING)
    two.prefill(Host.plain, "faulty_backends", "plan", "submit", fault)
    pair.on(pair.prefill, "send", room, 128)
    pair.fails(room, said)
    pair.ordinary()


def test_pages_that_sglang_takes_back_while_they_are_read_are_counted_and_the_room_is_free(two: Two) -> None:
    """Another rank of prefill has failed the request, so SGLang frees its pages at once. The library still has them."""
    pair = two.pair(HYBRID, backend="faulty-tcp")
    pair.ordinary()
    room = next(rooms)
    pair.open(room)
    pair.on(pair.decode, "name", room)
    assert pair.on(pair.prefill, "reach", room, WAITING)[-1] == WAITING
    two.prefill(Host.plain, "faulty_backends", "plan", "submit", "hang")
    pair.on(pair.prefill, "send", room, 128)
    end = time.monotonic() + 30
    while not two.prefill(Host.plain, "faulty_backends", "struck", "hang"):
        assert time.monotonic() < end
    assert "the vote of this server's ranks aborted the transfer" in pair.on(pair.prefill, "reason", room)
    assert pair.on(pair.decode, "reach", room, FAILED)[-1] == FAILED
    assert "prefill aborted the request" in pair.on(pair.decode, "reason", room)
    assert pair.on(pair.decode, "release", room, 30.0) < 30.0
    pair.end(room)
    assert pair.on(pair.prefill, "taken_back") == {"prefill": {"engine": 1}}
    assert pair.on(pair.decode, "taken_back") == {}
    pair.ordinary(room=room)
    two.prefill(Host.plain, "faulty_backends", "heal")
    pair.ordinary()
