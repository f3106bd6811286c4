"""What the ranks of a prefill instance tell each other about a room, if an engine asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from tests.helpers.fleet import Fleet
from tests.helpers.peers import until
from tests.link.test_topology import TCP, sharded, shards

import statelink
from statelink import Status, state
from statelink.errors import ConfigError
from statelink.rendezvous import RendezvousServer
from statelink.wire import Channel

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

CONFIG: dict[str, Any] = {"backend": "tcp", "inspect": False, "heartbeat": 0.2, "liveness": 5.0}
_kept: list[Any] = []


def link_of(role: str, layers: range, rank: int = 0, ranks: int = 1, **config: Any) -> statelink.Link:
    """A link over a few pages of some layers, which nobody looks at."""
    pages = {layer: (np.zeros((8, 16, 2, 8), np.uint8), np.zeros((8, 16, 2, 8), np.uint8)) for layer in layers}
    _kept.append(pages)
    inventory = state.describe(role, [state.kv_pages(pages, heads=2)], rank=rank, ranks=ranks)
    return statelink.open({"role": role, **CONFIG, **config}, inventory)


class Stages(NamedTuple):
    """Two pipeline stages of prefill, and a decode rank with all layers."""

    prefill: list[statelink.Link]
    decode: statelink.Link

    def receive(self, room: int) -> statelink.Receiving:
        return self.decode.receive(room, [link.address for link in self.prefill], 4, {"kv": [1]})


@pytest.fixture
def stages() -> Iterator[Stages]:
    with ExitStack() as stack:
        prefill = [stack.enter_context(link_of("prefill", range(n, n + 1), n, 2)) for n in range(2)]
        for number, link in enumerate(prefill):
            link.siblings([prefill[1 - number].address])
        yield Stages(prefill, stack.enter_context(link_of("decode", range(2))))


def test_a_room_is_as_far_as_its_last_rank(stages: Stages) -> None:
    first = stages.prefill[0].send(7, 4)
    receiving = stages.receive(7)
    until(lambda: first.status is Status.WAITING)
    for _ in range(2):
        assert first.poll_all() is Status.BOOTSTRAPPING  # the other stage has not opened it
    second = stages.prefill[1].send(7, 4)
    until(lambda: first.poll_all() is Status.WAITING)
    first.push({"kv": [0]})
    until(lambda: first.status > Status.WAITING)
    assert first.poll_all() is Status.WAITING
    second.push({"kv": [0]})
    assert receiving.wait(20) is first.wait(20) is second.wait(20) is Status.SUCCEEDED
    until(lambda: first.poll_all() is Status.SUCCEEDED)
    assert second.poll_all() in (Status.BOOTSTRAPPING, Status.SUCCEEDED)  # it has not asked before
    until(lambda: second.poll_all() is Status.SUCCEEDED)  # also of a room that the other one has forgotten


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many messages of each type the links have sent."""
    counts: Counter[str] = Counter()
    sent = Channel.send

    def send(self: Channel, message: Any, address: str | None = None) -> bool:
        counts[type(message).__name__] += 1
        return sent(self, message, address)

    monkeypatch.setattr(Channel, "send", send)
    return counts


@pytest.mark.parametrize("asks", ["before", "after"])
def test_a_failure_on_one_rank_is_seen_on_the_other(stages: Stages, said: Counter[str], asks: str) -> None:
    """Although nothing of it comes from decode, which has never asked."""
    first, second = (link.send(7, 4) for link in stages.prefill)
    if asks == "before":
        first.poll_all()
        until(lambda: said["Standing"])  # the other rank knows who asks
    second.abort()
    until(lambda: second.status is Status.FAILED)
    until(lambda: first.poll_all() is Status.FAILED)
    assert first.status is Status.BOOTSTRAPPING
    # The id is free again, and the ranks open it one after the other.
    first.abort()
    until(lambda: first.quiesced and first.status is Status.FAILED)
    first, second = (link.send(7, 4) for link in stages.prefill)
    assert first.poll_all() is Status.BOOTSTRAPPING


def test_an_answer_that_was_lost_comes_again(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: Counter[str] = Counter()
    sent = Channel.send

    def send(self: Channel, message: Any, address: str | None = None) -> bool:
        name = type(message).__name__
        if name in ("Inquire", "Standing") and lost[name] < 2:
            lost[name] += 1
            return True
        return sent(self, message, address)

    monkeypatch.setattr(Channel, "send", send)
    first, second = (link.send(7, 4) for link in stages.prefill)
    receiving = stages.receive(7)
    for sending in (first, second):
        until(lambda: sending.status is Status.WAITING)  # noqa: B023 - it is called at once
    until(lambda: first.poll_all() is Status.WAITING)
    assert lost == {"Inquire": 2, "Standing": 2}
    receiving.abort()


def test_nothing_is_said_unless_an_engine_asks(stages: Stages, said: Counter[str]) -> None:
    sendings = [link.send(7, 4) for link in stages.prefill]
    receiving = stages.receive(7)
    for sending in sendings:
        sending.push({"kv": [0]})
    assert receiving.wait(20) is Status.SUCCEEDED
    assert (said["Request"], said["Inquire"], said["Standing"]) == (2, 0, 0)


def test_a_rank_that_is_alone_asks_nobody() -> None:
    with link_of("prefill", range(1)) as prefill:
        sending = prefill.send(7, 4)
        assert sending.poll_all() is Status.BOOTSTRAPPING
        sending.abort()
        until(lambda: sending.poll_all() is Status.FAILED)


def test_ranks_that_are_not_known_cannot_be_asked() -> None:
    with link_of("prefill", range(1), 0, 3) as prefill:
        sending = prefill.send(7, 4)
        for known in ([], ["tcp://127.0.0.1:1"]):
            prefill.siblings(known)
            with pytest.raises(
                ConfigError, match=f"addresses of {len(known)} of them are known, and there are 2"
            ) as no:
                sending.poll_all()
            assert no.value.code == "config.peer"


def test_ranks_that_a_rendezvous_server_knows() -> None:
    with (
        RendezvousServer() as server,
        link_of("prefill", range(1), 0, 2, rendezvous=server.address) as first,
    ):
        one = first.send(7, 4)
        assert one.poll_all() is Status.BOOTSTRAPPING
        with link_of("prefill", range(1, 2), 1, 2, rendezvous=server.address) as second:
            other = second.send(7, 4)
            other.abort()
            until(lambda: one.poll_all() is Status.FAILED)


@TCP
def test_ranks_in_processes_of_their_own(two_engines: TwoEngines) -> None:
    fleet = Fleet(two_engines, shards(2), [sharded(0, 1)])
    for link in fleet.prefill.links:
        link.siblings([each.address for each in fleet.prefill.links if each is not link])
    sendings = [link.send(77, 16) for link in fleet.prefill.links]
    until(lambda: sendings[0].poll_all() is Status.BOOTSTRAPPING)
    sendings[1].abort("as planned")
    until(lambda: sendings[0].poll_all() is Status.FAILED)
    sendings[0].abort("as planned")
    fleet.run(64)
