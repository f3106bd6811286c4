"""A prefill engine that takes the number of tokens from decode: what it may push before, and what then has to fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.helpers.links import Rank, link_of
from tests.helpers.peers import until
from tests.helpers.pools import Aux, Kv, Mamba, Memory

import statelink
from statelink import Pages, Status
from statelink.errors import RoomError

PAGE = 16


class Two(NamedTuple):
    """Two links, and their memory."""

    prefill: statelink.Link
    decode: statelink.Link
    source: Rank
    target: Rank

    def receive(self, tokens: int, room: int = 7) -> statelink.Receiving:
        pages = -(-tokens // PAGE)
        return self.decode.receive(room, self.prefill.address, tokens, {"kv": range(20, 20 + pages)})


@pytest.fixture
def two() -> Iterator[Two]:
    source, target = Rank("prefill", 1), Rank("decode")
    config = {"backend": "tcp"}
    with source.open(config, role="prefill") as prefill, target.open(config, role="decode") as decode:
        yield Two(prefill, decode, source, target)


@pytest.mark.parametrize("asks", ["first", "between", "last"])
def test_pushes_before_and_after_decode_says_how_many_tokens_there_are(two: Two, asks: str) -> None:
    receiving = two.receive(50) if asks == "first" else None
    sending = two.prefill.send(7)
    if asks == "first":
        until(lambda: sending.tokens == 50)
    else:
        assert sending.tokens is None
    sending.push({"kv": [0, 1]}, span=(0, 32), last=False)
    if asks == "between":
        receiving = two.receive(50)
        until(lambda: sending.tokens == 50)
        sending.push({"kv": [2, 3]})  # to the end, of which it is known where it is
    else:
        sending.push({"kv": [2, 3]}, span=(32, 50), last=True)
    receiving = receiving or two.receive(50)
    assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason
    assert sending.tokens == sending.report.tokens == 50
    expected = np.zeros_like(two.target.arrays)
    expected[:, 20:24] = two.source.arrays[:, :4]
    np.testing.assert_array_equal(two.target.arrays, expected)


@pytest.mark.parametrize(
    ("ends", "tokens", "said"),
    [
        ([32, 50], 49, "the last push ends at 50 on prefill, 49 on decode"),
        ([32, 50], 64, "the last push ends at 50 on prefill, 64 on decode"),
        ([32], 20, "a push ends at 32 on prefill, 20 on decode"),
    ],
)
def test_a_push_that_ends_elsewhere_fails_the_room(two: Two, ends: list[int], tokens: int, said: str) -> None:
    sending = two.prefill.send(7)
    for first, end in itertools.pairwise([0, *ends]):
        sending.push({"kv": range(first // PAGE, -(-end // PAGE))}, span=(first, end), last=end == 50)
    receiving = two.receive(tokens)
    assert receiving.wait(20) is sending.wait(20) is Status.FAILED
    assert sending.reason is not None
    assert (sending.reason.code, sending.reason.cause) == ("room.tokens", said)
    assert not two.target.arrays.any()


def test_once_it_is_known_a_push_beyond_the_end_is_refused(two: Two) -> None:
    sending, receiving = two.prefill.send(7), two.receive(20)
    until(lambda: sending.tokens == 20)
    with pytest.raises(RoomError, match="the end of the span of a push is 32"):
        sending.push({"kv": [0, 1]}, span=(0, 32), last=False)
    sending.push({"kv": [0, 1]})
    assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"last": True}, "a push does not say which tokens it covers"),
        ({"span": (0, 16)}, "a push does not say whether it is the last one"),
        ({"span": (0, 20), "last": False}, "splits a page"),
        ({"span": (32, 16), "last": False}, r"span \[32, 16\) of a push"),
    ],
)
def test_what_a_push_has_to_say(two: Two, named: Any, said: str) -> None:
    sending = two.prefill.send(7)
    with pytest.raises(RoomError, match=said) as caught:
        sending.push({"kv": [0, 1]}, **named)
    assert caught.value.code == "room.push"
    sending.push({"kv": [0, 1]}, span=(0, 32), last=True)
    assert two.receive(32).wait(20) is sending.wait(20) is Status.SUCCEEDED


def test_a_window_and_a_slot_go_with_the_last_push(tmp_path: Any) -> None:
    """Which pages a window needs depends on N. A page that is named with its position may go before."""
    pools = (Kv(layers=(0,), pages=16), Kv(name="swa", layers=(1,), pages=16, window=20), Mamba(), Aux())
    source, target = (Memory(tmp_path / name, pools) for name in ("prefill", "decode"))
    source.fill(1)
    config: dict[str, Any] = {"backend": "tcp", "inspect": False}
    with (
        statelink.open({"role": "prefill", **config}, source.inventory("prefill")) as prefill,
        statelink.open({"role": "decode", **config}, target.inventory("decode")) as decode,
    ):
        sending = prefill.send(7)
        for early in ({"swa": [0, 1]}, {"mamba": [0]}, {"aux": [0]}):
            with pytest.raises(RoomError, match=r"last push|is final only") as caught:
                sending.push(early, span=(0, 32), last=False)
            assert caught.value.code == "room.push"
        sending.push({"kv": [0, 1], "swa": Pages([1], 16)}, span=(0, 32), last=False)
        sending.push({"kv": [2], "swa": [2], "mamba": [1], "aux": [3]}, span=(32, 40), last=True)
        given = {"kv": [5, 6, 7], "swa": [8, 9], "mamba": [2], "aux": [1]}
        receiving = decode.receive(7, prefill.address, 40, given)
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED, receiving.reason
    for here, there, name in (
        ([0, 1, 2], [5, 6, 7], "kv"),
        ([1, 2], [8, 9], "swa"),
        ([1], [2], "mamba"),
        ([3], [1], "aux"),
    ):
        for label, array in target.arrays[name].items():
            np.testing.assert_array_equal(array[there], source.arrays[name][label][here])


def test_numbers_that_are_none() -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        with pytest.raises(RoomError):
            prefill.send(7, 0)
        with pytest.raises(RoomError):
            decode.receive(7, prefill.address, 0)
