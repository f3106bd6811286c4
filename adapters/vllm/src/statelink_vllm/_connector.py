"""The class that vLLM makes: once in the engine core, and once in each worker. Each has one side of it."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_dcp_group, get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec, iter_layer_specs

from statelink import state

from ._early import EarlyChunks
from ._events import recorded
from ._inventory import Model, describe_cache
from ._leftovers import Leftovers
from ._limits import check_server
from ._messages import Address, ToWorker
from ._moving import Moving
from ._options import read_options
from ._scheduler import SchedulerSide
from ._seam import SEAM
from ._stats import PromMetrics, TransferStats
from ._worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["StatelinkConnector"]

log = logging.getLogger("vllm.statelink")

GROUPS_OF_MAMBA2 = ("mamba_n_groups", "n_groups", "ssm_n_groups", "mamba_ngroups")
"""Names under which configurations of models have the number of groups of Mamba2 layers."""
RANK = re.compile("_dp[0-9]+$")
"""What vLLM adds to the name of an instance that is a rank of data parallelism."""


class StatelinkConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves the state of requests with Statelink. Everything here hands on to one of the two sides.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        role: Whether this is in the engine core or in a worker.
        kv_cache_config: vLLM's ``KVCacheConfig``.

    Raises:
        StatelinkError: The server cannot use Statelink; the text says why.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = read_options(transfer.kv_role, transfer.kv_connector_extra_config)
        for each in SEAM.check(allowed="version" in self._options.allow):
            log.warning("this vLLM was not tested with Statelink, and 'allow' has 'version': %s", each)
        check_server(vllm_config, self._options)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._handled: BaseException | None = None
        """An error that whoever called the engine was handling when the step began."""
        specs = [spec for group in kv_cache_config.transfer_groups for spec in iter_layer_specs(group.kv_cache_spec)]
        self._local = any(isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)) for spec in specs)
        if role is KVConnectorRole.SCHEDULER:
            at_least = 1 if self._local or kv_cache_config.has_mamba_layers else 0
            left_out = max(at_least, vllm_config.num_prefill_lookahead_tokens - 1)
            drafts = vllm_config.num_speculative_tokens
            beyond = 1 + drafts + vllm_config.num_lookahead_tokens if drafts else 0  # as vLLM's scheduler counts
            parallel = vllm_config.parallel_config
            moving = Moving(
                self._options.move_key,
                follows=vllm_config.use_v2_model_runner,
                longest=vllm_config.model_config.max_model_len,
                drains=vllm_config.shutdown_timeout > 0,
            )
            self._scheduler = SchedulerSide(
                self._options,
                transfer.engine_id,
                kv_cache_config,
                left_out,
                beyond,
                EarlyChunks(kv_cache_config, vllm_config),
                moving,
                follows=vllm_config.num_prefill_lookahead_tokens > 0,
                awaited=parallel.data_parallel_size > 1,  # vLLM sets 1 for ranks that share nothing
                spread=RANK.search(transfer.engine_id) is not None and not parallel.data_parallel_external_lb,
            )

    # What vLLM asks of the class.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads before tokens: then the tokens of a head are one run of bytes in a page."""
        return "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Yes: see `unregister_kv_caches`."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """What a worker counted, as another process gets it."""
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnectorPromMetrics | None:
        """The same for Prometheus."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether decode's own cache may have more of a prompt for one group of layers than for another.

        True without windows and attention chunks: prefill always sends the whole recurrent state, however much of
        attention decode has. False with them: decode's cache may lack some of their tokens, and decode receives only
        the tokens after those that its cache has.
        """
        return not self._local

    # The scheduler's side.

    @property
    def scheduler_side(self) -> SchedulerSide:
        """What decides in the engine core."""
        assert self._scheduler is not None, "only the engine core calls this"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the addresses of all workers."""
        self.scheduler_side.set_addresses(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """See `SchedulerSide.bind`."""
        self.scheduler_side.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """See `SchedulerSide.new_request`."""
        self.scheduler_side.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide.matched`."""
        return self.scheduler_side.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Every group that is moved: vLLM zeroes none of them while prefill writes to it."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerSide.allocated`."""
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `SchedulerSide.step`."""
        return self.scheduler_side.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerSide.told`."""
        self.scheduler_side.told(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerSide.finished`."""
        return self.scheduler_side.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerSide.finished`."""
        return self.scheduler_side.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """See `SchedulerSide.busy`."""
        return self.scheduler_side.busy

    def has_pending_block_frees(self) -> bool:
        """See `Unclaimed.give_way`. vLLM asks this before it preempts a request that runs."""
        return self.scheduler_side.give_way()

    def reset_cache(self) -> bool | None:
        """See `SchedulerSide.reset`."""
        self.scheduler_side.reset()
        return True

    # The worker's side.

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None, "only a worker calls this, after register_kv_caches"
        return self._worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describe the caches, and open the link."""
        config, cache = self._vllm_config, self._kv_cache_config
        parallel = config.parallel_config
        width, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        rank, stage = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group if stages > 1 else 0
        layers = config.compilation_config.static_forward_context
        text, speculation = config.model_config.hf_text_config, config.speculative_config
        drafts = None if speculation is None else speculation.draft_model_config
        model = Model(
            tp=(rank, width),
            heads=config.model_config.get_total_num_kv_heads(),
            groups=next((getattr(text, name) for name in GROUPS_OF_MAMBA2 if hasattr(text, name)), None),
            channels_first=is_conv_state_dim_first(),
            backend=lambda name: str(layers[name].get_attn_backend().get_name()),
            number=extract_layer_index,
            pages=self._options.pages,
            draft=lambda name: bool(layers[name].is_draft_layer),
            draft_heads=0 if drafts is None else drafts.get_total_num_kv_heads(),
            positions=_positions(parallel),
        )
        components, groups = describe_cache(cache, kv_caches, model)
        inventory = state.describe(
            config.kv_transfer_config.engine_id,
            components,
            rank=stage * width + rank,
            ranks=stages * width,
            axes={"tp": (rank, width), "pp": (stage, stages)},
            model=self._options.model or _identity(config.model_config),
        )
        device = next(iter(kv_caches.values())).device
        leftovers = Leftovers(cache, kv_caches, groups)
        # With two halves of a batch that take turns, a layer is called for each half, in a thread of its own.
        number = None if parallel.use_ubatching else extract_layer_index
        self._worker = WorkerSide(self._options.link, inventory, groups, leftovers, lambda: recorded(device), number)
        link = self._worker.link
        log.info(
            "Statelink backend %r moves %s of rank %d of %d; its link listens at %s",
            link.backend,
            ", ".join(f"{each.name} ({each.type})" for each in inventory.components),
            inventory.rank,
            inventory.ranks,
            link.address.partition("@")[0],
        )

    def unregister_kv_caches(self) -> None:
        """See `WorkerSide.suspend`."""
        self.worker_side.suspend()

    def restore_kv_caches(self) -> None:
        """See `WorkerSide.resume`."""
        self.worker_side.resume()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The address of this worker's link."""
        return Address(self.worker_side.link.address)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See `WorkerSide.prepare`. vLLM calls this right before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]
        assert isinstance(connector_metadata, ToWorker)
        self.worker_side.prepare(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `WorkerSide.begin`. What it sends was computed in an earlier step."""
        step = self._get_connector_metadata()
        assert isinstance(step, ToWorker)
        self.worker_side.begin(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """State never arrives in the middle of a forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See `WorkerSide.layer`. vLLM calls this where Python has launched a layer of attention."""
        if self._worker is not None:
            self._worker.layer(layer_name)

    def finish_forward(self) -> None:
        """See `WorkerSide.computed`. Only the second model runner calls this, when the forward pass is launched."""
        if self._worker is not None:
            self._worker.computed()

    def wait_for_save(self) -> None:
        """The same at the end of the step. Nothing is waited for.

        The first model runner calls this, too, when the forward pass has raised an error.
        """
        if self._worker is None:
            return
        error = sys.exc_info()[1]
        if error is None or error is self._handled:
            self._worker.computed()
        else:
            self._worker.failed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `WorkerSide.results`."""
        sent, received, failed = self.worker_side.results()
        return KVConnectorTransferResults(sent, received, failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See `WorkerSide.said`."""
        return self.worker_side.said()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """See `WorkerSide.stats`. The scheduler has none."""
        return None if self._worker is None else self._worker.stats()

    def shutdown(self) -> None:
        """Close the link. The scheduler has none: see `SchedulerSide.shutdown`."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.close()


def _positions(parallel: Any) -> state.Partition:
    """Which positions of a sequence this rank holds: blocks of them are dealt out over ranks of context parallelism."""
    size = parallel.decode_context_parallel_size
    if size == 1:
        return state.Partition()
    return state.Partition("cyclic", size, get_dcp_group().rank_in_group, parallel.cp_kv_cache_interleave_size)


def _identity(config: Any) -> str:
    """The identity of the model. Two servers with the same model have the same text, in whatever release of vLLM."""
    text = config.hf_text_config
    numbers = (text.num_hidden_layers, text.hidden_size, text.vocab_size)
    names = ",".join(getattr(config.hf_config, "architectures", None) or [type(text).__name__])
    return f"vllm, {names}, {'x'.join(map(str, numbers))}"
