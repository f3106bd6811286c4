"""An engine without a model: vLLM's own scheduler, block pool and aggregator, and this connector's own two sides.

What stands in for the model is deterministic. A token's state is a digest of all tokens up to it, and so is the next
token. Every step reads what a model's layers would read, and fails if anything else is there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import statelink
from statelink import state
from statelink_vllm.connector import Address, Leftovers, WorkerSide, describe_cache, read_options

from .caches import attention, make_cache, model_of, recurrent
from .engines import transfer
from .simulated_link import STATE, Memory, Network, SimulatedLink

if TYPE_CHECKING:
    from pathlib import Path

    from statelink_vllm.connector import StatelinkConnector

__all__ = ["CHUNK", "LONGEST", "WINDOW", "Ended", "Side", "SimulatedEngine", "tokens_of"]

LONGEST = 40
"""Most tokens of a request, those that decode adds included."""

WINDOW, CHUNK = 7, 6
HEADS = 2
GRAPHS = 5
"""One step in so many is a single graph, in which no layer is told of. In another one, layers are in no order."""
AT_ONCE = 2
"""Steps under way where the scheduler runs ahead."""


class Side(NamedTuple):
    """What an engine is like.

    Attributes:
        kinds: Its groups of layers, of ``full``, ``window``, ``chunk`` and ``recurrent``.
        block: Tokens of a block.
        blocks: Blocks, the null block included.
        ranks: Ranks of tensor parallelism.
        ahead: Whether its scheduler runs ahead of the model.
        policy: vLLM's ``kv_load_failure_policy``.
        role: vLLM's ``kv_role``.
        known: Whether links are found by configured names.
        urgency: Whether some requests are more urgent than others. Then there is no prefix cache: vLLM keeps a block
            for other requests that was not computed, where a request is preempted in the step that gave it the block.
        every: Whether decode holds the state of every conversation.
        eager: Whether a request begins although there are no blocks for all of its prompt.
        own: The adapter's own options.
    """

    kinds: tuple[str, ...]
    block: int
    blocks: int
    ranks: int = 1
    ahead: bool = False
    policy: str = "recompute"
    role: str = "kv_both"
    known: bool = False
    urgency: bool = False
    eager: bool = False
    every: bool = False
    own: Mapping[str, Any] = MappingProxyType({})


class Ended(NamedTuple):
    """How a request ended."""

    tokens: list[int]
    why: str
    params: dict[str, Any] | None


class Landed:
    """An event: the steps that were launched before it was made have been computed. It stands for a device's."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine, self._until = engine, engine.launched + engine.launching

    def query(self) -> bool:
        return self._engine.landed >= self._until


class _Running:
    """What a model's runner knows of a request."""

    def __init__(self, tokens: Sequence[int], tables: Sequence[Sequence[int]], computed: int) -> None:
        self.prompt = len(tokens)
        self.tokens = list(tokens)
        self.tables = [list(each) for each in tables]
        self.computed = computed


def digests_of(tokens: Sequence[int]) -> list[int]:
    """For each token a number that all tokens up to it decide."""
    found, last = [], 17
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


def sampled(digest: int) -> int:
    return digest % 89


def tokens_of(prompt: Sequence[int], count: int) -> list[int]:
    """What an engine answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sampled(digests_of(tokens)[-1]))
    return tokens[len(prompt) :]


class SimulatedEngine:
    """One engine.

    Args:
        name: Its ``engine_id``.
        model: The folder with the configuration of any model.
        side: What it is like.
        network: Carries what links move.
    """

    def __init__(self, name: str, model: Path, side: Side, network: Network) -> None:
        self.name, self.side = name, side
        cache = _cache(side)
        config = _config(name, model, side)
        moved = config.kv_transfer_config
        self._link = read_options(moved.kv_role, moved.kv_connector_extra_config).link
        init_none_hash(sha256)
        block, hashed = resolve_kv_cache_block_sizes(cache, config)
        kind = AsyncScheduler if side.ahead else Scheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block,
            hash_block_size=hashed,
        )
        self._hasher = get_request_block_hasher(hashed, sha256)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self.launched = self.landed = self.launching = 0
        """Steps that were launched, and that have been computed; 1 while a step is being launched."""
        self.between: Callable[[], None] = lambda: None
        """What else happens while a layer is launched."""
        self.preempted = 0
        self._watch_pool(network)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, side.ranks)
        self.memories = [Memory() for _ in range(side.ranks)]
        self.workers = [self._worker(rank, network) for rank in range(side.ranks)]
        self.connector: StatelinkConnector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): Address(worker.link.address) for rank, worker in enumerate(self.workers)}
        )
        self._known: dict[str, _Running] = {}
        self._launched: deque[tuple[Any, list[KVConnectorOutput]]] = deque()
        self._tokens: dict[str, list[int]] = {}
        self.rooms: dict[int, str] = {}
        """For each room that is received, its request."""
        self.ended: dict[str, Ended] = {}

    def _worker(self, rank: int, network: Network) -> WorkerSide:
        groups = [
            (_spec(kind, self.side.block, self.side.ranks), layers_of(n, kind))
            for n, kind in enumerate(self.side.kinds)
        ]
        made = make_cache(groups)
        components, described = describe_cache(made.config, made.tensors, model_of((rank, self.side.ranks), HEADS))
        inventory = state.describe(self.name, components, rank=rank, ranks=self.side.ranks)
        self._groups = {group.component.name: group.table for group in described}
        link = SimulatedLink(network, self, rank, inventory)
        with mock.patch.object(statelink, "open", return_value=link):
            leftovers = Leftovers(made.config, made.tensors, ())
            return WorkerSide(self._link, inventory, described, leftovers, lambda: Landed(self), extract_layer_index)

    def _watch_pool(self, network: Network) -> None:
        """See that no block is handed out while it is read, and count preemptions."""
        give, preempt = self.pool.get_new_blocks, self.scheduler._preempt_request

        def given(count: int) -> list[Any]:
            made: list[Any] = give(count)
            read = {item for room in network.rooms["send"] if room.link.engine is self for item in room.blocks_read()}
            assert not read & {block.block_id for block in made}, f"a block of {self.name} is given away and is read"
            return made

        def preempted(*given: Any, **more: Any) -> None:
            self.preempted += 1
            preempt(*given, **more)

        self.pool.get_new_blocks, self.scheduler._preempt_request = given, preempted

    def group_of(self, component: str) -> int:
        """The number of the group of layers that a component describes."""
        return self._groups[component]

    # What a server does.

    def add(
        self, name: str, prompt: Sequence[int], count: int, params: Any, priority: int = 0, **sampling: Any
    ) -> None:
        given = SamplingParams(
            max_tokens=count,
            **{"temperature": 0.0, "ignore_eos": True, **sampling},
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        self._tokens[name] = []
        self.scheduler.add_request(
            Request(name, list(prompt), given, None, block_hasher=self._hasher, priority=priority)
        )

    def abort(self, name: str) -> None:
        if name in self.scheduler.requests:
            for request in self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
                self._end(request.request_id, "abort", None)

    def reset(self, *, everything: bool) -> None:
        """Forget the prefix cache; with ``everything``, also what running requests have computed."""
        if not everything:
            self.scheduler.reset_prefix_cache(reset_connector=True)
        elif not self.side.ahead:
            with contextlib.suppress(RuntimeError):  # blocks are held
                self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def _end(self, name: str, why: str, params: dict[str, Any] | None) -> None:
        assert name not in self.ended, f"{name} has ended twice"
        self.ended[name] = Ended(self._tokens[name], why, params)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self._launched)

    def launch(self) -> None:
        """Schedule a step, and hand it to the workers."""
        if len(self._launched) < (AT_ONCE if self.side.ahead else 1) and self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._launched.append((step, [self._begin(worker, step) for worker in self.workers]))
            self.launched += 1

    def land(self) -> None:
        """The oldest step under way has been computed: take its outcome."""
        if not self._launched:
            return
        step, said = self._launched.popleft()
        self.landed += 1
        names, found = self._forward(step)
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, found, kv_connector_output=each)
            for each in said
        ]
        outcome = self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        for each in self.scheduler.update_from_output(step, outcome).values():
            for one in each.outputs:
                self._tokens[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self._end(one.request_id, str(one.finish_reason), one.kv_transfer_params)

    def step(self) -> None:
        """One step from its beginning to its end, behind those under way."""
        self.launch()
        self.land()

    def _begin(self, worker: WorkerSide, step: Any) -> KVConnectorOutput:
        asked = step.kv_connector_metadata
        for name, receive in asked.receive.items():
            if receive.tables:
                self.rooms[receive.room] = name
        worker.prepare(asked)
        if step.total_num_scheduled_tokens:
            self.launching = 1
            self._launch_layers(worker)
        worker.begin(asked)
        worker.computed()  # the first model runner
        self.launching = 0
        results = worker.results()
        return KVConnectorOutput(
            finished_sending=results.sent or None,
            finished_recving=results.received or None,
            failed_recving=results.failed,
            kv_connector_stats=worker.stats(),
            kv_connector_worker_meta=worker.said(),
        )

    def _launch_layers(self, worker: WorkerSide) -> None:
        """Tell of the layers, unless the step is a single graph."""
        number = self.launched
        if number % GRAPHS:
            layers = [
                layer for n, kind in enumerate(self.side.kinds) if kind != "recurrent" for layer in layers_of(n, kind)
            ]
            if number % GRAPHS > 1:
                layers.sort()
            for layer in layers:
                self.between()
                worker.layer(f"model.layers.{layer}.attn")
        if number % 2:  # the second model runner
            worker.computed()

    # The model.

    def _forward(self, step: Any) -> tuple[list[str], list[list[int]]]:
        for name in step.finished_req_ids:
            self._known.pop(name, None)
        for memory in self.memories:
            for block in step.new_block_ids_to_zero or ():
                memory.clear(block)
            for copy in step.kv_cache_block_copies or ():
                memory.copy(copy.src_block_id, copy.dst_block_id)
        for new in step.scheduled_new_reqs:
            # One that resumes is new to the second model runner, with the tokens that it has made before.
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._known[new.req_id] = _Running(tokens, new.block_ids, new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            running, more = self._known[name], cached.new_block_ids[number]
            running.computed = cached.num_computed_tokens[number]
            if name in cached.resumed_req_ids:
                running.tables = [list(each) for each in more]
                del running.tokens[running.prompt + cached.num_output_tokens[number] :]
            elif more is not None:
                for table, found in zip(running.tables, more, strict=True):
                    table += found
        names = list(step.num_scheduled_tokens)
        return names, [self._compute(name, self._known[name], step.num_scheduled_tokens[name]) for name in names]

    def _compute(self, name: str, running: _Running, count: int) -> list[int]:
        first, last = running.computed, running.computed + count
        assert last <= len(running.tokens), f"{name}: {last} tokens are computed, and {len(running.tokens)} are known"
        digests = digests_of(running.tokens[:last])
        for group, (kind, table) in enumerate(zip(self.side.kinds, running.tables, strict=True)):
            for memory in self.memories:
                self._check(name, memory, group, kind, table, first, digests)
                if kind == "recurrent":
                    memory.write(group, table[(last - 1) // self.side.block], (group, STATE), (last, digests[-1]))
                    continue
                for at, layer in itertools.product(range(first, last), layers_of(group, kind)):
                    memory.write(group, table[at // self.side.block], (layer, at % self.side.block), digests[at])
        if last < len(running.tokens):
            return []
        running.tokens.append(sampled(digests[-1]))
        return running.tokens[-1:]

    def _check(
        self, name: str, memory: Memory, group: int, kind: str, table: Sequence[int], first: int, digests: list[int]
    ) -> None:
        """Read what layers read of earlier tokens."""
        if kind == "recurrent":
            if first:
                found = memory.read(group, table[(first - 1) // self.side.block], (group, STATE))
                assert found == (first, digests[first - 1]), f"{name}: after {first} tokens, the state is {found}"
            return
        begins = {"window": max(0, first - WINDOW + 1), "chunk": first // CHUNK * CHUNK}
        for at, layer in itertools.product(range(begins.get(kind, 0), first), layers_of(group, kind)):
            found = memory.read(group, table[at // self.side.block], (layer, at % self.side.block))
            assert found == digests[at], f"{name} of {self.name}: token {at} of layer {layer} is not there"

    # What must hold whenever a room touches memory.

    def check_read(self, block: int) -> None:
        assert self.pool.blocks[block].ref_cnt > 0, f"block {block} of {self.name} is sent and is free"

    def check_written(self, room: Any, block: int) -> None:
        """A block that is written belongs to the request that asked for it, or to nobody, and is in no prefix cache."""
        found = self.pool.blocks[block]
        assert found.ref_cnt > 0, f"block {block} of {self.name} is written and is free"
        assert found.block_hash is None, f"block {block} of {self.name} is written and is in the prefix cache"
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            for name, blocks in manager.req_to_blocks.items():
                if any(each.block_id == block for each in blocks):
                    request = self.scheduler.requests[name]
                    assert name == self.rooms[room.room], f"block {block} of {self.name} is written and is {name}'s"
                    waits = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
                    assert waits or request.is_finished(), f"{name} runs while its block {block} is written"

    def check_settled(self) -> None:
        """Nothing is left of any request."""
        assert not self.scheduler.requests
        assert self.pool.get_num_free_blocks() == self.free, f"blocks of {self.name} are lost"
        assert self.connector.scheduler_side.settled
        assert all(worker.settled for worker in self.workers)


def layers_of(group: int, kind: str) -> tuple[int, ...]:
    """The numbers of a group's layers. Those of several groups take turns."""
    return (group,) if kind == "recurrent" else (group, group + 10, group + 20)


def _spec(kind: str, block: int, ranks: int) -> Any:
    heads = max(HEADS // ranks, 1)
    if kind == "recurrent":
        page = attention(heads, block).page_size_bytes
        return recurrent("MAMBA1", (1, 4 // ranks), (4 // ranks, 2), page=page, block=block, mamba_cache_mode="align")
    local = {"window": WINDOW, "chunk": CHUNK}
    return attention(heads, block, **{kind: local[kind]} if kind in local else {})


def _cache(side: Side) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"model.layers.{layer}.attn" for layer in layers_of(n, kind)], _spec(kind, side.block, 1))
        for n, kind in enumerate(side.kinds)
    ]
    return KVCacheConfig(side.blocks, [], groups)


def _config(name: str, model: Path, side: Side) -> VllmConfig:
    # With so short a deadline, each step asks prefill to keep the state of what waits. Rooms here have no deadline.
    given: dict[str, Any] = {"backend": "tcp", "deadline": 1e-6, "vllm": dict(side.own)}
    if side.every:
        given["bidirectional_kv_xfer"] = True
    if side.known:
        given["peers"] = {each: ["tcp://127.0.0.1:1"] for each in ("one", "other")}
    moved = transfer(given, side.policy, kv_role=side.role, engine_id=name)
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST, seed=0
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=side.block, enable_prefix_caching=not side.urgency),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=12,
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy="priority" if side.urgency else "fcfs",
            scheduler_reserve_full_isl=not side.eager,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**moved),
    )
    # What vLLM settles for the model that is named is settled here for the layers that are meant.
    config.scheduler_config.async_scheduling = side.ahead
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.block_size = side.block
    config.cache_config.num_gpu_blocks = side.blocks
    if "recurrent" in side.kinds:
        config.cache_config.mamba_cache_mode = "align"
    return config
