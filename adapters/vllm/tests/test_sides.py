"""The connector's two sides by themselves: blocks of failed requests in vLLM's own pool, what ranks say, and counts."""

from __future__ import annotations

import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.v1.core.block_pool import BlockPool

from statelink import Status
from statelink.errors import Reason
from statelink_vllm.connector import FromWorker, HeldBlocks, Keep, PromMetrics, Receive, Send, ToWorker, TransferStats

pytestmark = pytest.mark.smoke


def said(unquiet: int = 0, quiet: int = 0) -> FromWorker:
    """What all ranks say of one request in a step."""
    return FromWorker(Counter({"r": unquiet} if unquiet else {}), Counter({"r": quiet} if quiet else {}))


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=16)


def test_blocks_are_held_until_the_last_rank_is_quiet(pool: BlockPool) -> None:
    held, free = HeldBlocks(), pool.get_num_free_blocks()
    held.bind(pool)
    blocks = pool.get_new_blocks(4)
    held.told(said(unquiet=2))
    held.ended("r", {0, *(block.block_id for block in blocks)})
    pool.free_blocks(blocks)  # vLLM gives them back
    assert held
    assert pool.get_num_free_blocks() == free - 4
    assert not {block.block_id for block in blocks} & {block.block_id for block in pool.get_new_blocks(free - 4)}
    held.told(said(quiet=1))
    assert pool.get_num_free_blocks() == 0
    held.told(said(quiet=1))
    assert pool.get_num_free_blocks() == 4
    assert not held


def test_what_is_quiet_before_its_end_is_not_held(pool: BlockPool) -> None:
    held, free = HeldBlocks(), pool.get_num_free_blocks()
    held.bind(pool)
    blocks = pool.get_new_blocks(4)
    held.told(said(unquiet=1))  # one of two ranks; the other one goes on
    held.told(said(quiet=1))
    held.ended("r", {block.block_id for block in blocks})
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == free
    assert not held


def test_what_was_never_in_danger_is_not_held(pool: BlockPool) -> None:
    held = HeldBlocks()
    held.bind(pool)
    held.ended("r", {1, 2})
    assert pool.get_num_free_blocks() == 15


def test_what_ranks_say_adds_up() -> None:
    one, other = FromWorker(Counter(r=1), claimed={"a"}), FromWorker(Counter(r=1), Counter(r=1), claimed={"b"})
    assert one.aggregate(other) == FromWorker(Counter(r=2), Counter(r=1), claimed={"a", "b"})
    assert FromWorker(claimed={"a"})
    assert not FromWorker()


def test_blocks_that_lack_tokens_on_any_rank_are_named() -> None:
    one, other = FromWorker(lacking={"a": {1}}), FromWorker(lacking={"a": {2}, "b": {3}})
    assert one
    assert one.aggregate(other).lacking == {"a": {1, 2}, "b": {3}}


def test_messages_go_from_process_to_process() -> None:
    step = ToWorker(
        send={"a": Send(7, 40, ([1, 2],))},
        receive={"b": Receive(8, ("tcp://127.0.0.1:1",), 40, 16, ([3, 4],))},
        abort={"c"},
        keep={"e": Keep(9, "prefill", 30.0)},
        again={"d"},
        unclaimed={"f": "others wait"},
        addresses=("tcp://127.0.0.1:2",),
    )
    assert pickle.loads(pickle.dumps(step)) == step
    assert step
    assert ToWorker(unclaimed={"f": ""})
    assert not ToWorker()


def room(status: Status, seconds: float = 0.5, code: str = "") -> Any:
    report = SimpleNamespace(transferred=seconds, moved={"kv": SimpleNamespace(nbytes=1 << 20)})
    return SimpleNamespace(status=status, report=report, reason=Reason(code, "it failed") if code else None)


def test_counts_are_of_rooms_that_ended() -> None:
    one, other = TransferStats(), TransferStats()
    assert one.is_empty()
    one.record(room(Status.SUCCEEDED, 0.25))
    other.record(room(Status.SUCCEEDED, 0.75))
    other.record(room(Status.FAILED, code="room.deadline"))
    other.record(room(Status.FAILED, code="room.declined"))
    one.aggregate(TransferStats(pickle.loads(pickle.dumps(other)).to_dict()))
    assert one.reduce() == {
        "Transfers": 2,
        "Mean time (ms)": 500.0,
        "Longest time (ms)": 750.0,
        "MiB": 2.0,
        "Declined": 1,
        "Failed: room.deadline": 1,
    }
    one.reset()
    assert one.is_empty()
    one.record(room(Status.FAILED, code="room.declined"))  # it is said, and has not failed
    assert not one.is_empty()
    assert one.reduce() == {"Transfers": 0, "Declined": 1}


def test_metrics_are_those_of_prometheus() -> None:
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: lambda _kind=kind, **given: _kind(registry=registry, **given)
        for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = PromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})
    stats = TransferStats()
    stats.record(room(Status.SUCCEEDED, 0.25))
    stats.record(room(Status.FAILED, code="room.deadline"))
    stats.record(room(Status.FAILED, code="room.declined"))
    metrics.observe(stats.to_dict(), engine_idx=1)
    assert registry.get_sample_value("vllm:statelink_transfer_seconds_sum", {"engine": "1"}) == 0.25
    assert registry.get_sample_value("vllm:statelink_transfer_bytes_count", {"engine": "1"}) == 1
    assert registry.get_sample_value("vllm:statelink_declined_transfers_total", {"engine": "1"}) == 1
    failed = "vllm:statelink_failed_transfers_total"
    assert registry.get_sample_value(failed, {"engine": "1", "code": "room.deadline"}) == 1
    assert registry.get_sample_value(failed, {"engine": "0", "code": "room.deadline"}) is None
