"""What vLLM's class works out from vLLM's configuration: tokens that prefill leaves out, and the numbers of ranks."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.caches import Cache, attention, make_cache, recurrent
from support.configurations import config_of
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import statelink
from statelink import Status, state
from statelink_vllm.connector import Address, Chunk, Open, StatelinkConnector, ToWorker

pytestmark = pytest.mark.smoke

FULL = attention(4)
KINDS = {
    "full": [(FULL, (0,))],
    "window": [(FULL, (0,)), (attention(4, window=32), (1,))],
    "chunk": [(FULL, (0,)), (attention(4, chunk=32), (1,))],
    "recurrent": [(FULL, (0,)), (recurrent("MAMBA1", (2, 8), (8, 4), page=FULL.page_size_bytes), (1,))],
}


def scheduler_of(config: Any, cache: Cache) -> StatelinkConnector:
    return StatelinkConnector(config, KVConnectorRole.SCHEDULER, cache.config)


def request_for(count: int) -> mock.MagicMock:
    """A request for so many tokens, whose state is to be sent."""
    request = mock.MagicMock(
        request_id="r",
        kv_transfer_params={"do_remote_decode": True},
        prompt_token_ids=[*range(20)],
        num_prompt_tokens=20,
        max_tokens=count,
    )
    request.get_skip_reading_prefix_cache.return_value = False
    request.use_structured_output = False
    return request


@pytest.mark.parametrize(
    ("kind", "lookahead", "left_out"),
    [
        ("full", 0, 0),
        ("window", 0, 1),
        ("chunk", 0, 1),
        ("recurrent", 0, 1),
        ("full", 1, 0),  # a drafter reads the next token, which prefill has sampled
        ("full", 4, 3),  # four modules, each of which reads one token further
        ("window", 1, 1),
        ("recurrent", 4, 3),
    ],
)
def test_prefill_leaves_out_what_decode_must_compute_anew(kind: str, lookahead: int, left_out: int) -> None:
    """vLLM takes the last ``lookahead - 1`` tokens of a prompt for not yet final, whatever layers there are."""
    side = scheduler_of(config_of(lookahead), make_cache(KINDS[kind])).scheduler_side
    assert side.tokens(20) == 20 - left_out
    request = request_for(1)
    side.new_request(request)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == 20 - left_out
    if left_out and lookahead:  # what a draft model takes for the next token is the next token
        assert request.sampling_params.allowed_token_ids == [20 - left_out]


@pytest.mark.parametrize(("lookahead", "refused"), [(1, False), (4, True)], ids=["EAGLE", "modules of MTP"])
def test_a_draft_model_that_looks_several_tokens_ahead_has_no_state_of_an_end(
    lookahead: int, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    side = scheduler_of(config_of(lookahead), make_cache(KINDS["full"])).scheduler_side
    with caplog.at_level("INFO"):
        side.new_request(request_for(9))
    assert ("a draft model that looks several tokens ahead" in caplog.text) is refused


@pytest.mark.parametrize(("kind", "may"), [("full", True), ("recurrent", True), ("window", False), ("chunk", False)])
def test_full_attention_may_be_here_further_than_what_prefill_sends_anyway(kind: str, may: bool) -> None:
    """Only what follows the prefix comes. The prefix must have all of a window or of an attention chunk itself."""
    assert scheduler_of(config_of(), make_cache(KINDS[kind])).supports_divergent_local_hybrid_hits is may


def test_ranks_are_numbered_stage_by_stage_as_their_addresses_are() -> None:
    """A peer takes the address at place N of the list for that of rank N."""
    stages, width = 2, 3
    config, cache = config_of(stages=stages, width=width), make_cache(KINDS["full"])
    numbers = {}
    for stage, rank in itertools.product(range(stages), range(width)):
        worker = StatelinkConnector(config, KVConnectorRole.WORKER, cache.config)
        with (
            mock.patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank)),
            mock.patch.object(parallel_state, "_PP", SimpleNamespace(rank_in_group=stage)),
            mock.patch.object(statelink, "open") as opened,
        ):
            worker.register_kv_caches(cache.tensors)
        inventory = opened.call_args.args[1]
        assert inventory.ranks == stages * width
        assert inventory.axes == {"tp": state.Axis(rank, width), "pp": state.Axis(stage, stages)}
        numbers[stage, rank] = inventory.rank
    assert sorted(numbers.values()) == [*range(stages * width)]
    scheduler = scheduler_of(config, cache)
    scheduler.set_xfer_handshake_metadata_pp_aware(
        {place: Address(f"tcp://127.0.0.1:{1 + number}") for place, number in reversed(numbers.items())}
    )
    step = scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0, finished_req_ids=set()))
    assert step.addresses == tuple(f"tcp://127.0.0.1:{1 + number}" for number in range(stages * width))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_other_ranks_wait_for_does_not_wait_for_state(replicas: int) -> None:
    """Ranks of data parallelism that share experts step together: each would wait for the slowest."""
    scheduler = scheduler_of(config_of(replicas=replicas), make_cache(KINDS["full"]))
    step = scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0, finished_req_ids=set()))
    assert step.idle is (replicas == 1)


class Room:
    """A room that decode has asked for, and that notes what happens to it."""

    status, quiesced, prefix, settled = Status.WAITING, False, 0, 0

    def __init__(self) -> None:
        self.said: list[Any] = []

    def push(self, items: Any, *, layers: Any, last: bool, **more: Any) -> None:
        self.said.append((layers, last))

    def abort(self, why: str) -> None:
        self.said.append(why)

    def extend(self, seconds: float) -> None: ...


def runs(worker: StatelinkConnector, *, error: bool = False, second: bool = False) -> None:
    """A step as vLLM's model runners call a connector. The first one calls it also if the forward pass has failed."""
    worker.bind_connector_metadata(
        ToWorker(open={"r": Open(7, 20, b"")}, chunks={"r": Chunk(0, 0, 20, ([1, 2],), True)})
    )
    try:
        for number in range(2):
            worker.save_kv_layer(f"model.layers.{number}.attn", None, None)
            if error:
                raise ArithmeticError
        if second:
            worker.finish_forward()
    finally:
        worker.start_load_kv(None)
        worker.wait_for_save()
        worker.clear_connector_metadata()


LAYERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "the first model runner": ({}, [((0, 1), False), ((1, 2), True)]),
    "the second model runner": ({"second": True}, [((0, 1), False), ((1, 2), True)]),
    "a forward pass that fails": ({"error": True}, [((0, 1), False), "the forward pass of prefill has failed"]),
    "two halves that take turns": ({"second": True}, [(None, True)]),
}


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("handling", [False, True])
def test_layers_leave_as_vllm_tells_of_them(case: str, handling: bool) -> None:
    """Also where whoever calls vLLM is handling an error of its own."""
    how, said = LAYERS[case]
    config, cache, room = config_of(), make_cache([(FULL, (0, 1))]), Room()
    config.parallel_config.use_ubatching = "halves" in case
    worker = StatelinkConnector(config, KVConnectorRole.WORKER, cache.config)
    with (
        mock.patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=0)),
        mock.patch.object(statelink, "open", return_value=mock.MagicMock(send=lambda *given, **more: room)),
    ):
        worker.register_kv_caches(cache.tensors)
    with contextlib.suppress(ArithmeticError):
        if handling:
            try:
                raise KeyError
            except KeyError:
                runs(worker, **how)
        else:
            runs(worker, **how)
    assert room.said == said
