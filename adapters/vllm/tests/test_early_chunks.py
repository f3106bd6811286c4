"""Parts of a prompt that are sent while it is computed: vLLM's own scheduler and block pool, in any order of events.

Engines have few blocks, so that vLLM preempts requests whose blocks are read. `support.simulated_engine` sees that no
such block is given away, `support.simulated_link` that nothing is sent twice or too soon, and `SimulatedPair.settle`
that every prompt arrives whole and no block is lost.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support.caches import attention, make_cache
from support.configurations import config_of
from support.engines import PREFILL
from support.simulated_pair import SimulatedPair, pair_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from statelink import Status
from statelink_vllm.connector import StatelinkConnector

if TYPE_CHECKING:
    from pathlib import Path

    from support.simulated_link import SimulatedRoom

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("quiet")]

RUNS = 30
KINDS = [("full",), ("window", "full"), ("recurrent", "full"), ("recurrent", "window")]
WITHOUT = 150
"""Most runs until one without references finds a block that is given away while it is read."""
ACTS = {"request": 15, "launch": 20, "land": 20, "event": 30, "abort": 2, "reset": 1}


def early(room: SimulatedRoom) -> int:
    """Pushes of a room of prefill that were not its last one."""
    return len(room.pushes) - int(room.complete)


def random_pair(configuration: Path, kinds: tuple[str, ...], rng: random.Random) -> SimulatedPair:
    made = pair_of(
        configuration,
        kinds,
        blocks=rng.choice([(4, 4), (4, 2)] if "window" in kinds else [(4, 4), (2, 4), (4, 2), (2, 8)]),
        spare=(rng.choice([0, 1, 2, 6]), rng.choice([2, 12, 30])),
        ranks=rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)]),
        ahead=rng.random() < 0.5,
        policy=rng.choice(["recompute", "fail"]),
        at_once=True,
        urgency="recurrent" not in kinds and rng.random() < 0.4,
        eager=rng.random() < 0.8,
    )
    made.rough, made.network.refused = rng.random() < 0.5, rng.choice([0, 0, 3, 7])
    return made


def play(pair: SimulatedPair, rng: random.Random) -> None:
    acts = rng.choices(list(ACTS), list(ACTS.values()), k=rng.randint(60, 250))
    pair.play([(what, rng.randrange(1 << 16)) for what in acts])


@pytest.mark.shows("parts of a prompt that are sent while it is computed, through any order of events")
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_whatever_happens_a_block_is_held_while_it_is_read(configuration: Path, kinds: tuple[str, ...]) -> None:
    pushes = preempted = 0
    for seed in range(RUNS):
        rng = random.Random(f"{kinds} {seed}")
        pair = random_pair(configuration, kinds, rng)
        play(pair, rng)
        pushes += sum(map(early, pair.network.rooms["send"]))
        preempted += sum(engine.preempted for engine in pair.engines)
    assert pushes > RUNS, "hardly anything was sent early"
    assert preempted > RUNS // 2, "hardly any request was preempted"


class NoReferences:
    """A pool of blocks in which nobody holds anything."""

    def __init__(self, pool: Any) -> None:
        self.blocks = pool.blocks

    def touch(self, blocks: Any) -> None:
        pass

    def free_blocks(self, blocks: Any) -> None:
        pass


def test_without_references_blocks_are_given_away_while_they_are_read(configuration: Path) -> None:
    """So the test above can fail."""
    for seed in range(WITHOUT):
        rng = random.Random(seed)
        pair = random_pair(configuration, ("full",), rng)
        for engine in pair.engines:
            engine.connector.scheduler_side.early.bind(NoReferences(engine.pool))
        with contextlib.suppress(AssertionError):
            play(pair, rng)
            continue
        return
    pytest.fail("no run went wrong")


def steps(pair: SimulatedPair, count: int) -> None:
    """Both engines take so many steps, and nothing moves."""
    for _ in range(count):
        for engine in pair.engines:
            engine.step()


def arrives(pair: SimulatedPair) -> None:
    """Let everything arrive that was pushed."""
    while moves := [happen for kind, happen in pair.network.events(kind=True) if kind == "write"]:
        moves[0]()


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def pair(configuration: Path, request: pytest.FixtureRequest) -> SimulatedPair:
    return pair_of(configuration, ("full",), blocks=(4, 4), spare=(40, 40), at_once=True, ahead=request.param)


def rooms(pair: SimulatedPair) -> tuple[SimulatedRoom, SimulatedRoom]:
    """The rooms of the only request."""
    (sending,), (receiving,) = (pair.network.rooms[side] for side in ("send", "receive"))
    return sending, receiving


def test_each_step_sends_what_it_computes_by_layers(pair: SimulatedPair) -> None:
    """Twelve tokens are computed in a step. The first step is a single graph."""
    pair.request(0, 35)
    source, target = pair.engines
    target.step()
    for _ in range(20):
        steps(pair, 1)
        if source.ended:
            break
    sending, receiving = rooms(pair)
    assert [push.layers for push in sending.pushes] == [None, *[(0, 1), (1, 11), (11, 21)] * 2]
    assert sending.complete, "nothing waits for the request's end"
    arrives(pair)
    assert receiving.left_of(sending) == []
    pair.settle()


def begun(pair: SimulatedPair) -> SimulatedRoom:
    """Go on until a part of the only request is pushed and nothing of it has arrived."""
    for _ in range(20):
        steps(pair, 1)
        found: list[SimulatedRoom] = pair.network.rooms["send"]
        if found and found[0].pushes:
            return found[0]
    raise AssertionError("nothing is sent early")


def test_decode_hears_of_an_abort_of_what_has_begun(pair: SimulatedPair) -> None:
    name = pair.request(0, 35)
    sending = begun(pair)
    source = pair.engines[0]
    held = source.free - source.pool.get_num_free_blocks()
    pair.abort(name, 0)
    steps(pair, 4)
    assert sending.given_up == "prefill did not compute the prompt: FINISHED_ABORTED"
    read = len(sending.blocks_read())
    assert 0 < read <= held
    assert source.free - source.pool.get_num_free_blocks() == read, "nothing else is held"
    pair.settle()
    assert pair.engines[1].ended[name].why == "length", "decode has computed the prompt itself"


def test_a_reset_of_the_caches_gives_up_what_has_begun(pair: SimulatedPair) -> None:
    """The model may have other weights now. What is computed with them does not go with what was sent before."""
    name = pair.request(0, 35)
    sending = begun(pair)
    sent = len(sending.pushes)
    pair.engines[0].scheduler.reset_prefix_cache(reset_connector=True)
    steps(pair, 8)
    assert "caches were reset" in sending.given_up
    assert len(sending.pushes) == sent, "nothing more is sent"
    assert "caches were reset" in str(pair.engines[0].ended[name].params)
    pair.settle()


def test_what_vllm_computes_again_in_place_is_given_up(configuration: Path) -> None:
    """Another connector could not load a part of the prompt: what was sent of it may be wrong."""
    pair = pair_of(configuration, ("full",), blocks=(4, 4), spare=(40, 40), at_once=True)
    name = pair.request(0, 35)
    sending = begun(pair)
    (running,) = pair.engines[0].scheduler.running
    running.num_computed_tokens = 4
    steps(pair, 8)
    assert "computes a part of the prompt again" in sending.given_up
    assert "computes a part of the prompt again" in str(pair.engines[0].ended[name].params)
    pair.settle()
    assert pair.engines[1].ended[name].why == "length"


def test_after_a_load_that_may_fail_the_last_push_waits_for_the_end(configuration: Path) -> None:
    """Another connector loads a part of some prompt in a step. vLLM hears only afterwards that it could not."""
    pair = pair_of(configuration, ("full",), blocks=(4, 4), spare=(40, 40), at_once=True)
    source = pair.engines[0]
    made = source.connector.build_connector_meta
    source.connector.build_connector_meta = lambda output: made(replace(output, has_sync_kv_loads=True))
    pair.request(0, 35)
    pair.engines[1].step()
    while not source.ended:
        steps(pair, 1)
    sending, _ = rooms(pair)
    assert len(sending.pushes) == 7, "all layers have gone"
    assert not sending.complete
    steps(pair, 2)
    assert sending.complete
    assert not sending.pushes[-1].items
    pair.settle()


def test_blocks_that_the_same_step_computes_for_another_request_go_with_their_layers(configuration: Path) -> None:
    """The second request finds the first one's blocks in the prefix cache in the step that computes them."""
    pair = pair_of(configuration, ("full",), blocks=(4, 4), spare=(40, 40), at_once=True)
    for length in (9, 10):
        pair.request(0, length)
    source, target = pair.engines
    target.step()
    source.launched = 1  # the first step is a single graph
    source.landed = 1
    source.step()
    first, second = pair.network.rooms["send"]
    assert (
        [push.layers for push in first.pushes] == [push.layers for push in second.pushes] == [(0, 1), (1, 11), (11, 21)]
    )
    assert first.pushes[0].items["kv", 1] == second.pushes[0].items["kv", 1]
    pair.settle()


NOTHING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several modules of MTP": ({"num_prefill_lookahead_tokens": 2}, {}),
    "context parallelism": ({"decode_context_parallel_size": 2}, {}),
    "more input that comes": ({}, {"resumable": True}),
    "logprobs of the prompt": ({}, {"skip": True}),
    "embeddings": ({}, {"prompt_embeds": object()}),
    "no token ids": ({}, {"prompt_token_ids": None}),
    "nothing of the kind": ({}, {}),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_is_sent_early_where_it_is_not_known_to_stay(case: str) -> None:
    of_config, of_request = NOTHING[case]
    config = config_of()
    config.num_prefill_lookahead_tokens = of_config.get("num_prefill_lookahead_tokens", 0)
    config.parallel_config.decode_context_parallel_size = of_config.get("decode_context_parallel_size", 1)
    side = StatelinkConnector(
        config, KVConnectorRole.SCHEDULER, make_cache([(attention(4), (0,))]).config
    ).scheduler_side
    request = mock.MagicMock(
        request_id="r",
        kv_transfer_params={"do_remote_decode": True, "transfer_id": "r"},
        num_prompt_tokens=20,
        num_computed_tokens=0,
        max_tokens=1,
        **{"prompt_embeds": None, "prompt_token_ids": [*range(20)], "resumable": False, **of_request},
    )
    request.get_skip_reading_prefix_cache.return_value = of_request.get("skip", False)
    side.new_request(request)
    assert side.early.settled is (case != "nothing of the kind")


def test_what_decode_has_not_asked_for_is_withdrawn_from_a_request_that_is_preempted(configuration: Path) -> None:
    """Its blocks would be kept from the requests that run, until decode has memory for it."""
    pair = pair_of(configuration, ("full",), blocks=(4, 4), spare=(3, 3), at_once=True)
    source = pair.engines[0]
    source.add("first", list(range(35)), 1, {**PREFILL, "transfer_id": "first"})
    for _ in range(2):
        source.step()
    side = source.connector.scheduler_side
    (sending,) = pair.network.rooms["send"]
    assert side.early, "a part waits for decode"
    (running,) = source.scheduler.running
    source.scheduler.running.remove(running)
    source.scheduler._preempt_request(running, 0.0)
    source.step()
    assert not side.early
    assert not sending.pushes
    assert sending.status is Status.BOOTSTRAPPING
    for _ in range(20):
        source.step()
    assert sending.complete
    sending.abort("its client has left")
    pair.settle()


def test_a_serial_router_gets_everything_at_the_end(configuration: Path) -> None:
    """Decode asks when prefill has answered: nothing could be sent before."""
    pair = pair_of(configuration, ("full",), blocks=(4, 4), spare=(40, 40))
    pair.request(0, 35)
    source = pair.engines[0]
    for _ in range(3):
        assert not pair.network.rooms["send"]
        source.step()
    pair.settle()
    assert [len(room.pushes) for room in pair.network.rooms["send"]] == [1]


# Of windows and attention chunks, the second step sends nothing. It tells of the layers group by group.
SEVERAL = [None, (0, 22), (0, 2), (2, 12), (12, 21), (21, 22)]
ENDS: dict[tuple[str, ...], list[Any]] = {
    ("window",): [(0, 1), (1, 11), (11, 21)],
    ("recurrent", "window"): [(0, 2), (2, 12), (12, 22), None],
    ("window", "full"): SEVERAL,
    ("chunk", "full"): SEVERAL,
}


@pytest.mark.parametrize("kinds", ENDS, ids="-".join)
def test_layers_of_which_only_the_end_is_needed_are_sent_in_the_step_that_ends_the_prompt(
    configuration: Path, kinds: tuple[str, ...]
) -> None:
    """Windows and attention chunks by layers, and a recurrent state when the step is launched."""
    pair = pair_of(configuration, kinds, blocks=(2, 2), spare=(100, 40), at_once=True)
    pair.request(0, 35)
    source, target = pair.engines
    target.step()
    while not source.ended:
        steps(pair, 1)
    (room,) = pair.network.rooms["send"]
    assert [push.layers for push in room.pushes] == ENDS[kinds]
    assert room.complete
    pair.settle()


def test_what_is_held_is_a_part_of_the_pool_at_most(configuration: Path) -> None:
    """Whatever has been computed: the rest follows."""
    pair = pair_of(configuration, ("full",), blocks=(2, 2), spare=(0, 40), at_once=True)
    source = pair.engines[0]
    pair.request(0, 35)
    most = 0
    for _ in range(10):
        steps(pair, 1)
        most = max([most, *(len(room.blocks_read()) for room in pair.network.rooms["send"] if not room.complete)])
    assert source.ended
    assert most == source.side.blocks // 4 == 5
    pair.settle()
