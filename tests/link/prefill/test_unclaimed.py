"""Rooms that prefill's engine gives up unless a decode rank has said a word, and who may say that nobody will ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from tests.helpers.links import link_of
from tests.helpers.peers import until

import statelink
from statelink import Status, state

WHY = "another request needs its memory"


@contextlib.contextmanager
def ranks_of(name: str, count: int) -> Iterator[list[statelink.Link]]:
    """The links of a decode instance with so many ranks, for a prefill of one rank."""
    pages = np.zeros((2, count, 8, 16, 2 // count, 8), np.uint8)

    def inventory(rank: int) -> state.Inventory:
        part = state.kv_pages({0: (pages[0, rank], pages[1, rank])}, heads=2, tp=(rank, count))
        return state.describe(name, [part], rank=rank, ranks=count)

    with contextlib.ExitStack() as opened:
        config = {"role": "decode", "backend": "tcp", "heartbeat": 0.1, "liveness": 4.0}
        links = [opened.enter_context(statelink.open(config, inventory(rank))) for rank in range(count)]
        for link in links:
            link.siblings([each.address for each in links if each is not link])
        yield links


def meet(prefill: statelink.Link, links: list[statelink.Link], room: int = 1) -> None:
    """Move the state of a request. On these connections, prefill has then read all that was said before."""
    receiving = [link.receive(room, prefill.address, 16, {"kv": [0]}) for link in links]
    sending = prefill.send(room, 16)
    sending.push({"kv": [0]})
    assert {each.wait(20) for each in (sending, *receiving)} == {Status.SUCCEEDED}


@pytest.mark.parametrize("word", ["none", "kept", "one of two ranks asked", "asked"])
def test_a_room_of_which_decode_has_said_a_word_is_not_given_up(word: str) -> None:
    with link_of("prefill") as prefill, ranks_of("decode", 2) as links:
        meet(prefill, links)
        sending = prefill.send(7, 16)
        receiving = []
        if word == "kept":
            links[0].keep(7, prefill.address, 30)
        elif word != "none":
            asking = links if word == "asked" else links[:1]
            receiving = [link.receive(7, prefill.address, 16, {"kv": [1]}) for link in asking]
        if word != "none":
            until(lambda: sending.claimed)
        sending.abort_unclaimed(WHY)
        assert sending.claimed is (word != "none")
        if word == "none":
            assert sending.wait(20, quiesced=True) is Status.FAILED
        for link in links[len(receiving) :]:
            receiving.append(link.receive(7, prefill.address, 16, {"kv": [1]}))
        sending.push({"kv": [0]})
        assert {each.wait(20) for each in (sending, *receiving)} == {
            Status.FAILED if word == "none" else Status.SUCCEEDED
        }
        for each in (sending, *receiving) if word == "none" else ():
            assert each.reason is not None
            assert (each.reason.code, each.reason.cause) == ("room.unclaimed", WHY)
            assert "does each request reach decode" in each.reason.hint


def test_the_word_of_a_decode_that_is_lost_does_not_count() -> None:
    with link_of("prefill") as prefill, ranks_of("other", 1) as others:
        with ranks_of("decode", 1) as links:
            meet(prefill, links)
            sending = prefill.send(7, 16)
            links[0].keep(7, prefill.address, 30)
            until(lambda: sending.claimed)
        until(lambda: not sending.claimed)
        others[0].keep(7, prefill.address, 30)
        until(lambda: sending.claimed)


@pytest.mark.parametrize("count", [1, 2])
def test_a_room_that_an_instance_asked_to_keep_is_not_for_another_one_to_decline(count: int) -> None:
    """It ends when each rank that asked has declined it. Its id may then be used again."""
    with link_of("prefill") as prefill, ranks_of("decode", count) as links, ranks_of("other", 1) as others:
        meet(prefill, links)
        meet(prefill, others, 2)
        sending = prefill.send(7, 16)
        for link in links:
            link.keep(7, prefill.address, 30)
        meet(prefill, links, 3)
        others[0].decline(7, prefill.address, "it had the answer to another request")
        meet(prefill, others, 4)
        assert sending.status is Status.BOOTSTRAPPING
        for number, link in enumerate(links, 1):
            link.decline(7, prefill.address, "its client left")
            if number < count:
                meet(prefill, links, 4 + number)
                assert sending.status is Status.BOOTSTRAPPING
        assert sending.wait(20) is Status.FAILED
        assert sending.reason is not None
        assert (sending.reason.code, sending.reason.cause) == ("room.declined", "its client left")
        meet(prefill, links, 7)
