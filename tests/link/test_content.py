"""Both sides of a room state which request it is: what happens where they differ, and when it is stated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from tests.helpers.fleet import Fleet, only
from tests.helpers.links import Rank
from tests.helpers.peers import until
from tests.helpers.pools import Kv

import statelink
from statelink import Receiving, Sending, Status, content_of
from statelink.errors import RoomError

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

TOKENS = 50
PAGES = {"kv": range(4)}
ITEMS = {"kv": range(20, 24)}
A, B = content_of([*range(TOKENS)]), content_of([*range(1, TOKENS + 1)])


class Two(NamedTuple):
    """Two links, and their memory."""

    prefill: statelink.Link
    decode: statelink.Link
    source: Rank
    target: Rank

    def arrived(self) -> bool:
        return bool(self.target.arrays.any())


@pytest.fixture
def two() -> Iterator[Two]:
    source, target = Rank("prefill", 1), Rank("decode")
    config = {"backend": "tcp"}
    with source.open(config, role="prefill") as prefill, target.open(config, role="decode") as decode:
        yield Two(prefill, decode, source, target)


def both(two: Two, prefill: bytes | None, decode: bytes | None, *, first: str) -> tuple[Sending, Receiving]:
    """Open and fill a room on both sides, with what each of them states."""

    def send() -> Sending:
        sending = two.prefill.send(7, TOKENS, content=prefill)
        sending.push(PAGES)
        return sending

    def receive() -> Receiving:
        return two.decode.receive(7, two.prefill.address, TOKENS, ITEMS, content=decode)

    if first == "prefill":
        sending = send()
        return sending, receive()
    receiving = receive()
    until(lambda: receiving.status is Status.WAITING)
    return send(), receiving


def failed_alike(two: Two, sending: Sending, receiving: Receiving, cause: str) -> None:
    """Both rooms failed for the contents, and no byte has moved."""
    assert receiving.wait(20, quiesced=True) is sending.wait(20, quiesced=True) is Status.FAILED
    for room in (sending, receiving):
        assert room.reason is not None
        assert (room.reason.code, room.reason.cause) == ("room.content", cause)
    assert not two.arrived()
    assert sending.nbytes == receiving.nbytes == 0


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("prefill", "decode", "cause"),
    [
        (A, B, f"content {A.hex()} on prefill, {B.hex()} on decode"),
        (A, None, f"content {A.hex()} on prefill, none on decode"),
        (None, B, f"content none on prefill, {B.hex()} on decode"),
        (A, A[:8], f"content {A.hex()} on prefill, {A[:8].hex()} on decode"),
    ],
)
def test_different_contents_fail_the_room_on_both_sides(
    two: Two, prefill: bytes | None, decode: bytes | None, cause: str, first: str
) -> None:
    sending, receiving = both(two, prefill, decode, first=first)
    failed_alike(two, sending, receiving, cause)
    # The next request goes through, under the same id.
    sending, receiving = both(two, A, A, first=first)
    assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason
    assert two.arrived()


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("content", [A, None, b"\0", b"x" * 64])
def test_the_same_content_or_none_goes_through(two: Two, content: bytes | None, first: str) -> None:
    sending, receiving = both(two, content, content, first=first)
    assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason
    assert sending.content == receiving.content == content
    np.testing.assert_array_equal(two.target.arrays[:, 20:24], two.source.arrays[:, :4])


@pytest.mark.parametrize("content", [b"", b"x" * 65, "text", 5, bytearray(b"x"), True, [1]])
def test_what_is_no_content_is_refused_and_changes_nothing(two: Two, content: Any) -> None:
    for call in (
        lambda: two.prefill.send(7, TOKENS, content=content),
        lambda: two.decode.receive(7, two.prefill.address, TOKENS, content=content),
    ):
        with pytest.raises(RoomError, match="the content of a request is") as caught:
            call()
        assert caught.value.code == "room.content"
    sending, receiving = both(two, A, A, first="prefill")
    assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((A, A), (A, B)), ((A, A), (B, A)), ((A, B), (A, A)), ((A, A), (A, None)), ((A, None), (A, A)), ((A, A), (A, A))],
)
def test_every_rank_has_to_hold_the_same_request(
    two_engines: TwoEngines, prefill: tuple[bytes | None, ...], decode: tuple[bytes | None, ...]
) -> None:
    """Two ranks on each side, each with half of the heads. A pair of ranks that differ fails on both sides."""
    halves = [[Kv(tp=(rank, 2))] for rank in range(2)]
    fleet = Fleet(two_engines, halves, halves)
    case = fleet.case(48)
    named: dict[str, Any] = {"deadline": 30}
    receiving = [
        link.receive(case.room, fleet.peer, case.tokens, only(case.target, link), content=each, **named)
        for link, each in zip(fleet.decode.links, decode, strict=True)
    ]
    sending = [
        link.send(case.room, case.tokens, content=each, **named)
        for link, each in zip(fleet.prefill.links, prefill, strict=True)
    ]
    for room, memory in zip(sending, fleet.prefill.memories, strict=True):
        room.push(case.span(0, case.tokens, memory.pools), span=(0, case.tokens))
    if set(prefill) == set(decode) == {A}:
        for each in (*receiving, *sending):
            each.succeeded()
        return
    for rank, (here, there) in enumerate(zip(prefill, decode, strict=True)):
        if here != there:
            for side in (receiving[rank], sending[rank]):
                assert side.why().code == "room.content"
