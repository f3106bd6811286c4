"""vLLM's own scheduler, block pool and aggregator with this connector, through orders of events that no server forces.

Hypothesis chooses the engines, the clients' requests, and what happens when. See `support.simulated_engine` for what is
checked in every step, and `SimulatedPair.settle` for what is checked at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.simulated_pair import Act, SimulatedPair, pair_of

from statelink import Status

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("quiet")]

KINDS = [("full",), ("window", "full"), ("recurrent", "full"), ("full", "window", "recurrent"), ("chunk", "full")]

ACTS = st.lists(
    st.tuples(
        st.sampled_from(["request", "launch", "launch", "land", "land", "event", "event", "event", "abort"]),
        st.integers(0, 1 << 16),
    ),
    max_size=150,
)

SHAPES = st.fixed_dictionaries(
    {
        "blocks": st.sampled_from([(4, 4), (2, 4), (4, 2), (2, 8)]),
        "spare": st.tuples(st.integers(0, 12), st.integers(0, 12)),
        "ranks": st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
        "ahead": st.booleans(),
        "policy": st.sampled_from(["recompute", "fail"]),
        "at_once": st.booleans(),
    }
)


@pytest.mark.shows("vLLM's own scheduler and block pool, through any order of events")
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=SHAPES, acts=ACTS)
def test_whatever_happens_every_request_ends_once_and_no_block_is_lost(
    configuration: Path, kinds: tuple[str, ...], shape: dict[str, Any], acts: list[Act]
) -> None:
    pair_of(configuration, kinds, **shape).play(acts)


def arrives(pair: SimulatedPair) -> None:
    """Let state arrive, and everything that follows from it, but let nothing fail."""
    while honest := [happen for kind, happen in pair.network.events(kind=True) if kind in ("write", "arrive")]:
        honest[0]()


def test_a_failed_request_does_not_wait_for_blocks_of_those_that_wait_behind_it(configuration: Path) -> None:
    """To compute a prompt takes more blocks than to receive it, since windows move on. Another request has them."""
    pair = pair_of(configuration, ("window", "full"), blocks=(4, 4), spare=(30, 0))
    source, target = pair.engines
    for stream in (0, 1):
        pair.request(stream, 28)
    while len(target.rooms) < 2:
        for engine in (source, target):
            engine.step()
        pair.route()
    first, second = pair.network.rooms["receive"]
    first.end("prefill was lost")
    arrives(pair)
    assert second.status is Status.SUCCEEDED
    assert target.pool.get_num_free_blocks() < 4
    pair.settle()
    assert [target.ended[name].why for name in pair.requests] == ["length", "length"]


def test_requests_that_are_received_do_not_wait_for_each_others_blocks(configuration: Path) -> None:
    """Each needs a block of each group for its last token. vLLM reserves only that of the layers without a window."""
    kinds = ("window", "window", "full")
    pair = pair_of(configuration, kinds, blocks=(2, 2), spare=(30, 47 - 1 - len(kinds) * 20))
    for stream, length in ((0, 35), (1, 33)):
        pair.request(stream, length)
    pair.settle()
    assert [pair.engines[1].ended[name].why for name in pair.requests] == ["length", "length"]


def test_a_short_request_does_not_overtake_one_that_waits_for_blocks(configuration: Path) -> None:
    """Else a stream of short ones would keep the blocks for which the long one waits."""
    kinds = ("window", "window", "full")
    pair = pair_of(configuration, kinds, blocks=(2, 2), spare=(60, 47 - 1 - len(kinds) * 20))
    target = pair.engines[1]
    for stream, length in ((0, 35), (1, 33), (1, 5)):
        pair.request(stream, length)
    for _ in range(100):
        for engine in pair.engines:
            engine.step()
        pair.route()
    assert len(target.scheduler.requests) == 3
    assert len(pair.network.rooms["receive"]) == 1
    pair.settle()
    assert [pair.requests[target.rooms[each.room]].prompt for each in pair.network.rooms["receive"][:2]] == [
        pair.requests[name].prompt for name in ("r0", "r1")
    ]


def test_prefill_keeps_the_state_of_a_request_that_waits_for_blocks(configuration: Path) -> None:
    """Decode has blocks for one request. It asks prefill to keep the other's state until it has blocks for that."""
    pair = pair_of(configuration, ("full",), blocks=(4, 4), spare=(30, 0))
    source, target = pair.engines
    for stream in (0, 1):
        pair.request(stream, 28)
    for _ in range(40):
        for engine in (source, target):
            engine.step()
        pair.route()
    (first,) = pair.network.rooms["receive"]
    assert pair.network.kept == {room.room for room in pair.network.rooms["send"]} - {first.room}
    pair.settle()
    assert [target.ended[name].why for name in pair.requests] == ["length", "length"]


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_that_a_step_under_way_writes_to_are_given_to_nobody(configuration: Path, ahead: bool) -> None:
    """A peer's write is not ordered behind that step. Where the scheduler runs ahead, vLLM defers such blocks."""
    pair = pair_of(configuration, ("full",), blocks=(4, 4), spare=(9, 9), ahead=ahead)
    source, target = pair.engines
    pair.request(0, 21)
    while not target.ended and not target.scheduler.running:
        for engine in (source, target):
            engine.step()
        pair.route()
        arrives(pair)
    (running,) = target.scheduler.running
    target.launch()
    free = target.pool.get_num_free_blocks()
    target.abort(running.request_id)
    assert target.scheduler.defer_block_free is ahead
    assert (target.pool.get_num_free_blocks() == free) is ahead
    target.land()
    for _ in range(3):  # vLLM gives them back with a later step
        for engine in (source, target):
            engine.step()
    assert target.pool.get_num_free_blocks() > free


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
def test_a_block_without_the_tokens_in_front_of_a_window_serves_no_other_request(
    configuration: Path, ranks: tuple[int, int]
) -> None:
    """Of tokens 8 to 15, only 14 and 15 come. A shorter prompt with this beginning needs 12 and 13, too."""
    pair = pair_of(configuration, ("window", "full"), blocks=(2, 8), spare=(9, 9), ranks=ranks)
    pair.request(0, 21)
    pair.settle()
    pair.request(0, 19)
    pair.settle()


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
def test_tokens_behind_a_window_do_not_stand_in_for_those_in_front_of_it(
    configuration: Path, ranks: tuple[int, int]
) -> None:
    """Of tokens 24 to 35, those from 26 to 33 come. A shorter prompt with this beginning needs 25, too."""
    pair = pair_of(configuration, ("window",), blocks=(2, 4), spare=(9, 9), ranks=ranks)
    lengths = {pair.request(0, 34): 34}
    pair.settle()
    lengths[pair.request(0, 32)] = 32
    pair.settle()
    moved = {lengths[pair.engines[1].rooms[room.room]]: room for room in pair.network.rooms["receive"]}
    assert {length: room.prefix for length, room in moved.items()} == {34: 0, 32: 0}
    (component,) = moved[34].link.inventory.components
    held = sum(buffer.layout.held for buffer in component.buffers)  # four tokens
    assert moved[34].report.moved[component.name].nbytes == 2 * held


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
def test_a_block_in_which_an_attention_chunk_begins_serves_other_requests(
    configuration: Path, ranks: tuple[int, int]
) -> None:
    """Of tokens 8 to 15, those from 12 on come. Whoever has the first 16 looks at none before 12."""
    pair = pair_of(configuration, ("chunk", "full"), blocks=(2, 8), spare=(9, 9), ranks=ranks)
    lengths = {pair.request(0, 17): 17}
    pair.settle()
    lengths.update({pair.request(0, length): length for length in (18, 20, 24, 17, 9)})
    pair.settle()
    found = {(lengths[pair.engines[1].rooms[room.room]], room.prefix) for room in pair.network.rooms["receive"]}
    # The second request of 17 tokens has all that it needs. That of 9 needs the chunk before, which is not kept.
    assert sorted(found) == [(9, 0), (17, 0), (18, 16), (20, 16), (24, 16)]


def test_a_block_of_which_all_tokens_have_come_serves_other_requests(configuration: Path) -> None:
    pair = pair_of(configuration, ("window", "full"), blocks=(8, 8), spare=(9, 9))
    name = pair.request(0, 21)
    pair.settle()
    other = pair.request(0, 19)
    pair.settle()
    moved = {pair.engines[1].rooms[room.room]: room for room in pair.network.rooms["receive"]}
    assert (moved[name].prefix, moved[other].prefix) == (0, 16)
