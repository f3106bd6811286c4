"""What the adapter uses of vLLM, release by release.

vLLM calls the interface of its connectors experimental, and it grew in every release. What is written here is compared
with the installed vLLM. See `statelink.seam`.
"""

from __future__ import annotations

from statelink.seam import Kind, Seam, Table, methods

__all__ = ["SEAM"]

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CACHE = "vllm.v1.kv_cache_interface"
OUTPUTS = "vllm.v1.outputs"
MANAGER = "vllm.v1.core.kv_cache_manager"
ASYNC = "vllm.v1.engine.async_llm"
CLIENT = "vllm.v1.engine.core_client"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

CORE = "vllm.v1.engine.core"
MIDDLEWARE = "statelink_vllm._at_once"

# fmt: off
CLASSES: dict[str, dict[str, str]] = {
    f"{BASE}:KVConnectorBase_V1": {
        "__init__": "self vllm_config role kv_cache_config",
        "supports_divergent_local_hybrid_hits": "@property self",
        "requires_kv_delivery": "@property self",
        "supports_sleep_mode": "cls kv_transfer_config",
        "role": "@property self",
        "get_mem_pool_context": "self",
        "bind_connector_metadata": "self connector_metadata",
        "clear_connector_metadata": "self",
        "has_connector_metadata": "self",
        "register_kv_caches": "self kv_caches",
        "unregister_kv_caches": "self",
        "restore_kv_caches": "self",
        "set_host_xfer_buffer_ops": "self copy_operation",
        "finish_forward": "self",
        "reset_capture_state": "self",
        "handle_preemptions": "self kv_connector_metadata",
        "start_load_kv": "@abstract self forward_context **kwargs",
        "wait_for_layer_load": "@abstract self layer_name",
        "save_kv_layer": "@abstract self layer_name kv_layer attn_metadata **kwargs",
        "wait_for_save": "@abstract self",
        "get_finished": "self finished_req_ids",
        "get_transfer_results": "self finished_req_ids",
        "get_block_ids_with_load_errors": "self",
        "shutdown": "self",
        "get_kv_connector_stats": "self",
        "get_kv_connector_kv_cache_events": "self",
        "get_handshake_metadata": "self",
        "build_connector_worker_meta": "self",
        "bind_kv_cache_manager": "self kv_cache_manager",
        "bind_gpu_block_pool": "self gpu_block_pool",
        "get_loaded_kv_cache_group_ids": "self request",
        "get_num_new_matched_tokens": "@abstract self request num_computed_tokens",
        "get_external_cache_hit_sources": "self request num_external_tokens",
        "update_state_after_alloc": "@abstract self request blocks num_external_tokens",
        "build_connector_meta": "@abstract self scheduler_output",
        "on_new_request": "self request",
        "update_connector_output": "self connector_output",
        "request_finished": "self request block_ids",
        "register_finished_partial_tail": "self request block_ids partial_tail_offloads",
        "take_events": "self",
        "has_pending_block_frees": "self",
        "has_pending_push_work": "self",
        "get_required_kvcache_layout": "cls vllm_config",
        "requires_piecewise_for_cudagraph": "cls extra_config",
        "get_finished_count": "self",
        "build_kv_connector_stats": "cls data=",
        "set_xfer_handshake_metadata": "self metadata",
        "set_xfer_handshake_metadata_pp_aware": "self metadata",
        "build_prom_metrics": "cls vllm_config metric_types labelnames per_engine_labelvalues",
        "reset_cache": "self",
    },
    f"{BASE}:SupportsHMA": {"request_finished_all_groups": "@abstract self request block_ids"},
    f"{BASE}:KVConnectorWorkerMetadata": {"aggregate": "@abstract self other"},
    f"{METRICS}:KVConnectorStats": {
        "__init__": "self data=",
        "to_dict": "self",
        "reset": "self",
        "aggregate": "self other",
        "reduce": "self",
        "is_empty": "self",
    },
    f"{METRICS}:KVConnectorPromMetrics": {
        "__init__": "self vllm_config metric_types labelnames per_engine_labelvalues",
        "observe": "self transfer_stats_data engine_idx=",
    },
}
"""All methods and properties of the classes that the adapter's classes inherit from, and their definitions."""

FIELDS: dict[str, str] = {
    f"{BASE}:KVConnectorTransferResults": "finished_sending finished_recving failed_recving",
    f"{OUTPUTS}:KVConnectorOutput": "finished_sending finished_recving kv_connector_stats kv_cache_events "
    "kv_connector_worker_meta invalid_block_ids failed_recving expected_finished_count",
    f"{CACHE}:KVCacheConfig": "num_blocks kv_cache_tensors kv_cache_groups prefix_cache_retention_interval "
    "kv_cache_layout hash_block_size cache_hit_alignment_tokens hisparse_host_num_blocks hisparse_host_block_stride "
    "hisparse_shared_host_pool kv_tp_replicas",
    f"{CACHE}:KVCacheGroupSpec": "layer_names kv_cache_spec is_eagle_group host_resident enable_kv_transfer role",
    f"{CACHE}:FullAttentionSpec": "block_size dcp_sharded block_stride_alignment is_draft max_tp_shards "
    "num_kv_heads head_size dtype head_size_v kv_quant_mode page_size_padded num_head_slots "
    "state_content_bytes tokens_per_state sliding_window attention_chunk_size non_causal",
    f"{CACHE}:MLAAttentionSpec": "block_size dcp_sharded block_stride_alignment is_draft max_tp_shards "
    "num_kv_heads head_size dtype head_size_v kv_quant_mode page_size_padded num_head_slots "
    "state_content_bytes tokens_per_state sliding_window attention_chunk_size non_causal cache_dtype_str "
    "topk_buffer_width alignment model_version cache_role is_index_group_leader non_causal_multi_token_decode",
    f"{CACHE}:SlidingWindowMLASpec": "block_size dcp_sharded block_stride_alignment is_draft max_tp_shards "
    "num_kv_heads head_size dtype head_size_v kv_quant_mode page_size_padded num_head_slots state_content_bytes "
    "tokens_per_state sliding_window extra_retained_tokens cache_dtype_str alignment model_version bounded_replay",
    f"{CACHE}:SlidingWindowSpec": "block_size dcp_sharded block_stride_alignment is_draft max_tp_shards "
    "num_kv_heads head_size dtype head_size_v kv_quant_mode page_size_padded num_head_slots "
    "state_content_bytes tokens_per_state sliding_window extra_retained_tokens",
    f"{CACHE}:ChunkedLocalAttentionSpec": "block_size dcp_sharded block_stride_alignment is_draft max_tp_shards "
    "num_kv_heads head_size dtype head_size_v kv_quant_mode page_size_padded num_head_slots "
    "state_content_bytes tokens_per_state attention_chunk_size",
    f"{CACHE}:MambaSpec": "block_size dcp_sharded block_stride_alignment is_draft shapes dtypes page_size_padded "
    "mamba_type mamba_cache_mode num_speculative_blocks num_prefill_checkpoint_blocks prefill_checkpoint_alignment "
    "num_heads tokens_per_state tp_replicated",
    "vllm.v1.core.sched.output:SchedulerOutput":
    "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
    "scheduled_spec_decode_tokens scheduled_encoder_inputs finished_req_ids free_encoder_mm_hashes "
    "encoder_input_updates scheduled_encoder_input_stats preempted_req_ids has_structured_output_requests "
    "pending_structured_output_tokens num_invalid_spec_tokens kv_connector_metadata has_sync_kv_loads "
    "aux_output_connector_metadata ec_connector_metadata ec_manager_metadata new_block_ids_to_zero "
    "kv_cache_block_copies kv_connector_block_state num_spec_tokens_to_schedule num_common_prefix_blocks "
    "skip_drafts",
    "vllm.v1.core.sched.output:KVConnectorBlockState": "req_ids resolve_block_ids boundary_state_offloads",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids "
    "num_computed_tokens num_output_tokens",
}
"""All fields of dataclasses."""

MEMBERS: dict[str, str] = {
    f"{CACHE}:SparseCacheRole": "SPARSE INDEXER",
    f"{BASE}:KVConnectorRole": "SCHEDULER WORKER",
    "vllm.v1.request:RequestStatus": "WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_REMOTE_KVS "
    "WAITING_FOR_STREAMING_REQ RUNNING PREEMPTED FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED "
    "FINISHED_IGNORED FINISHED_ERROR FINISHED_REPETITION",
}
"""All members of enumerations."""

CALLS: dict[str, str] = {
    f"{BASE}:KVConnectorTransferResults.__init__": "self finished_sending= finished_recving= failed_recving=",
    "vllm.v1.core.block_pool:BlockPool.touch": "self blocks",
    "vllm.v1.core.block_pool:BlockPool.free_blocks": "self ordered_blocks",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": "self",
    f"{MANAGER}:KVCacheManager.free": "self request",
    f"{MANAGER}:KVCacheManager.cache_blocks": "self request num_computed_tokens",
    f"{MANAGER}:KVCacheManager.get_computed_blocks": "self request max_cache_hit_length=",
    f"{MANAGER}:KVCacheManager.evict_blocks": "self block_ids",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": "self request_id num_tokens "
    "new_computed_blocks num_encoder_tokens total_computed_tokens num_local_computed_tokens num_tokens_main_model "
    "apply_admission_cap= prefill_end=",
    f"{CACHE}:KVCacheConfig.select_transfer_block_ids": "self block_ids",
    f"{CACHE}:iter_layer_specs": "kv_cache_spec",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": "",
    "vllm.distributed.parallel_state:get_pp_group": "",
    "vllm.distributed.parallel_state:get_dcp_group": "",
    "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first": "",
    "vllm.v1.metrics.utils:create_metric_per_engine": "metric per_engine_labelvalues",
    "vllm.v1.request:Request.is_finished": "self",
    "vllm.v1.request:Request.get_skip_reading_prefix_cache": "self",
}
"""Definitions of functions that are called."""

SERVER_CALLS: dict[str, str] = {
    f"{ASYNC}:AsyncLLM.generate": "async yield self prompt sampling_params request_id * prompt_text= lora_request= "
    "tokenization_kwargs= trace_headers= priority= data_parallel_rank= session_id= kv_hints= reasoning_ended= "
    "reasoning_parser_kwargs=",
    f"{ASYNC}:AsyncLLM.add_request": "async self request_id prompt params arrival_time= lora_request= "
    "tokenization_kwargs= trace_headers= priority= data_parallel_rank= session_id= prompt_text= reasoning_ended= "
    "reasoning_parser_kwargs= kv_hints=",
    f"{ASYNC}:AsyncLLM.abort": "async self request_id internal=",
}
"""Definitions of functions of an API server that the middleware calls, or sees called."""

SERVER_ATTRIBUTES: dict[str, str] = {
    f"{ASYNC}:AsyncLLM": "engine_core vllm_config",
    f"{CLIENT}:MPClient": "core_engines",
    f"{CLIENT}:DPLBAsyncMPClient": "reqs_in_flight",
}
"""Attributes of an API server's objects that the middleware reads."""

CORE_ATTRIBUTES: dict[str, str] = {f"{CORE}:EngineCoreProc": "input_queue engines_running"}
"""Attributes of an engine core that a step reads which has nothing to do."""

RELEASES: dict[str, dict[str, str | None]] = {
    "0.33": {},
    "0.32": {
        f"{BASE}:KVConnectorBase_V1": "-supports_sleep_mode -unregister_kv_caches -restore_kv_caches",
        f"{CACHE}:FullAttentionSpec": "-is_draft",
        f"{CACHE}:MLAAttentionSpec": "-is_draft -topk_buffer_width",
        f"{CACHE}:SlidingWindowMLASpec": "-is_draft",
        f"{CACHE}:SlidingWindowSpec": "-is_draft",
        f"{CACHE}:ChunkedLocalAttentionSpec": "-is_draft",
        f"{CACHE}:MambaSpec": "-is_draft",
        f"{MANAGER}:KVCacheManager.get_computed_blocks": "self request",
        "vllm.v1.core.sched.output:SchedulerOutput": "-encoder_input_updates -skip_drafts",
    },
    "0.31": {
        f"{BASE}:KVConnectorBase_V1": "-get_loaded_kv_cache_group_ids -get_external_cache_hit_sources",
        f"{CACHE}:KVCacheConfig": "-hash_block_size -cache_hit_alignment_tokens",
        f"{CACHE}:MLAAttentionSpec": "+storage_block_size",
        "vllm.v1.core.sched.output:SchedulerOutput": "+block_table_updates",
    },
}
"""From the newest release to the oldest, what differs from the release before it in this order."""
# fmt: on

SEAM = Seam(
    adapter="statelink-vllm",
    engine="vllm",
    title="vLLM",
    tables=(
        *methods(CLASSES),
        Table(Kind.FIELDS, FIELDS),
        Table(Kind.MEMBERS, MEMBERS),
        Table(Kind.PARAMETERS, CALLS),
        Table(Kind.PARAMETERS, SERVER_CALLS, MIDDLEWARE),
        Table(Kind.ATTRIBUTES, SERVER_ATTRIBUTES, MIDDLEWARE),
        Table(Kind.ATTRIBUTES, CORE_ATTRIBUTES, CORE),
    ),
    releases=RELEASES,
)
"""All that the adapter uses of vLLM."""
