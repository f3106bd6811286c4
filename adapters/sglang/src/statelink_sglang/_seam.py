"""What the adapter uses of SGLang, release by release.

The classes through which SGLang uses a transfer backend are no stable interface: they changed in every release. What is
written here is compared with the installed SGLang: the classes and methods that the adapter hooks and inherits, and the
attributes and variables that it reads. See `statelink.seam`.
"""

from __future__ import annotations

import sys

from statelink.seam import Kind, Seam, Table, Variable, methods

from ._options import VARIABLE, read_options

__all__ = ["CONTROLLER", "DETOKENIZER", "SCHEDULER", "SEAM", "TOKENIZER", "loaded"]

SCHEDULER = "sglang.srt.managers.scheduler"
CONTROLLER = "sglang.srt.managers.data_parallel_controller"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
TOKENIZER = "sglang.srt.managers.tokenizer_manager"

BASE = "sglang.srt.disaggregation.base.conn"
UTILS = "sglang.srt.disaggregation.utils"
HOOKS = "sglang.srt.plugins.hook_registry"
PREFILL = "sglang.srt.disaggregation.prefill"
DECODE = "sglang.srt.disaggregation.decode"
REQUEST = "sglang.srt.managers.schedule_batch"
STAGES = "sglang.srt.managers.scheduler_pp_mixin"
CACHE = "sglang.srt.mem_cache.common"
TREE = "sglang.srt.mem_cache.unified_radix_cache"
LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
BACKEND = "sglang.srt.layers.attention.base_attn_backend"

# fmt: off
MEMBERS: dict[str, str] = {
    f"{UTILS}:DisaggregationMode": "NULL PREFILL DECODE",
    f"{HOOKS}:HookType": "BEFORE AFTER AROUND REPLACE",
    f"{BASE}:StateType": "MAMBA QSA_PENDING QSA_COMPRESSED SWA DSA DSA_TAIL MINIMAX_INDEX_K MINIMAX_DENSE_KV SWA_RING "
    "DSV4_REQUEST_STATE REQUEST_ROW BLOCK_SCALE BLOCK_SCALE_SWA",
    f"{BASE}:KVPoll": "Failed Bootstrapping WaitingForInput Transferring Success",
}
"""All members of enumerations."""

FIELDS: dict[str, str] = {
    f"{BASE}:KVArgs": "engine_rank kv_data_ptrs kv_data_lens kv_item_lens kv_layer_ids kv_cache_dtype_str kv_layout "
    "host_kv_data_ptrs host_kv_data_lens host_kv_item_lens host_state_data_ptrs host_state_data_lens "
    "host_state_item_lens aux_data_ptrs aux_data_lens aux_item_lens state_types state_data_ptrs state_data_lens "
    "state_item_lens state_layer_ids state_dim_per_tensor state_slice_outer_counts is_hybrid_mla_backend "
    "state_conv_shard_groups swa_kv_cache_layout ib_device gpu_id kv_head_num total_kv_head_num page_size "
    "system_dp_rank rust_http_port pp_rank prefill_start_layer prefill_end_layer mla_compression_ratios "
    "kv_buf_groups hidden_kv_layers draft_kv_layers num_draft_entries",
    f"{BASE}:KVTransferMetric": "transfer_latency_s alloc_latency_s transfer_total_bytes",
}
"""All annotated fields."""

CLASSES: dict[str, dict[str, str]] = {
    f"{BASE}:BaseKVManager": {
        "__init__": "@abstract self args disaggregation_mode server_args is_mla_backend=",
        "should_verify_kv_checksum": "self bootstrap_addr",
        "register_to_bootstrap": "@abstract self",
        "teardown": "self",
    },
    f"{BASE}:BaseKVSender": {
        "__init__": "@abstract self mgr bootstrap_addr bootstrap_room req_has_disagg_prefill_dp_rank=",
        "init": "@abstract self num_kv_indices aux_index=",
        "send": "@abstract self kv_indices state_indices= num_kv_tokens=",
        "mark_prefill_complete": "self",
        "pop_decode_prefix_len": "self",
        "get_max_transfer_tokens": "self",
        "should_send_kv_chunk": "self num_pages last_chunk",
        "get_transfer_metric": "@abstract self",
        "poll": "@abstract self",
        "failure_exception": "@abstract self",
        "clear": "self",
        "abort": "self",
    },
    f"{BASE}:BaseKVReceiver": {
        "__init__": "@abstract self mgr bootstrap_addr bootstrap_room=",
        "supports_host_destination": "@property self",
        "is_abort_release_safe": "self",
        "init": "@abstract self prefill_dp_rank",
        "send_metadata": "@abstract self kv_indices aux_index= state_indices= decode_prefix_len= destination=",
        "poll": "@abstract self",
        "failure_exception": "@abstract self",
        "clear": "self",
        "abort": "self",
    },
    f"{BASE}:BaseKVBootstrapServer": {"__init__": "@abstract self host port"},
}
"""All methods of the classes that the adapter's classes inherit from, and their definitions."""

CALLS: dict[str, str] = {
    f"{BASE}:KVTransferMetric.__init__": "self transfer_latency_s= alloc_latency_s= transfer_total_bytes=",
    f"{UTILS}:get_kv_class": "transfer_backend class_type",
    f"{HOOKS}:HookRegistry.register": "cls target hook hook_type= * source=",
    "sglang.srt.arg_groups.pd_disaggregation_hook:handle_pd_disaggregation": "server_args",
}
"""Definitions of functions that are hooked or called, in every process."""

SCHEDULER_CALLS: dict[str, str] = {
    f"{PREFILL}:PrefillBootstrapQueue._init_kv_manager": "self",
    f"{PREFILL}:PrefillBootstrapQueue.create_sender": "self req num_kv_heads",
    f"{PREFILL}:PrefillBootstrapQueue.add": "self req num_kv_heads",
    f"{PREFILL}:PrefillBootstrapQueue.pop_bootstrapped": "self",
    f"{DECODE}:DecodePreallocQueue._init_kv_manager": "self",
    f"{DECODE}:DecodePreallocQueue.add": "self req is_retracted= is_rebootstrap=",
    f"{DECODE}:DecodePreallocQueue._create_receiver_and_enqueue": "self req is_rebootstrap=",
    f"{DECODE}:DecodePreallocQueue._rebootstrap_prefill_len": "req",
    f"{DECODE}:DecodePreallocQueue._resolve_prefill_dp_rank": "self req",
    f"{DECODE}:DecodePreallocQueue._ensure_prefill_info": "self addr_to_reqs",
    f"{DECODE}:DecodePreallocQueue.prefetch_prefill_dp_rank_queries": "self",
    f"{DECODE}:DecodeTransferQueue.resolve_deferred_releases": "self",
    f"{DECODE}:DecodeTransferQueue.has_pending_deferred_releases": "self",
    f"{SCHEDULER}:Scheduler.is_fully_idle": "self for_health_check= ignore_waiting=",
    f"{SCHEDULER}:Scheduler.run_batch": "self batch pp_proxy_tensors=",
    f"{CACHE}:checkpoint_kv_cache": "req tree_cache",
    f"{BACKEND}:AttentionBackend.forward": "self q k v layer forward_batch save_kv_cache= **kwargs",
    f"{STAGES}:SchedulerPPMixin._pp_pd_get_decode_transferred_ids": "self",
    f"{STAGES}:SchedulerPPMixin._pp_recv_pyobj_from_prev_stage": "self",
    f"{STAGES}:SchedulerPPMixin.get_rids": "self req_queue is_send *poll_statuses_group",
    f"{STAGES}:SchedulerPPMixin.process_decode_transfer_queue": "self release_rids",
    f"{DECODE}:SchedulerDisaggregationDecodeMixin.process_decode_queue": "self",
    f"{TREE}:UnifiedRadixCache.check_hicache_events": "self",
    f"{TREE}:UnifiedRadixCache.path_device_indices": "self node",
    f"{LINKER}:UnifiedCacheLinker.lookup": "@abstract self rid transfers",
    f"{LINKER}:UnifiedCacheLinker.load": "@abstract self rid transfers",
    f"{LINKER}:UnifiedCacheLinker.start_layer_wise_loading": "@abstract self",
    f"{LINKER}:UnifiedCacheLinker.finish_layer_wise_loading": "@abstract self counter_index",
    f"{LINKER}:UnifiedCacheLinker.cancel_queued_load": "@abstract self rid",
    f"{LINKER}:UnifiedCacheLinker.offload": "@abstract self transfers session_id=",
    f"{LINKER}:UnifiedCacheLinker.num_completed_offloads": "@abstract self",
    f"{LINKER}:UnifiedCacheLinker.pop_completed_offload": "@abstract self",
    f"{LINKER}:UnifiedCacheLinker.record_offload_ready": "self",
    f"{LINKER}:UnifiedCacheLinkerWrapper._offload_node": "self node_id transfers",
    f"{UTILS}:is_aborted": "req",
    f"{REQUEST}:Req.set_finish_with_abort": "self error_msg status_code= err_type=",
}
"""The same in schedulers."""

CONTROLLER_CALLS: dict[str, str] = {
    f"{CONTROLLER}:DataParallelController.follow_bootstrap_room_scheduler": "self req",
}
"""The same in a controller of DP ranks."""

TOKENIZER_CALLS: dict[str, str] = {
    f"{TOKENIZER}:TokenizerManager._handle_batch_request": "async yield self obj request request_states",
    f"{TOKENIZER}:TokenizerManager._send_one_request": "async self tokenized_obj",
}
"""The same in a process that takes requests."""

VARIABLES: dict[str, str] = {
    f"{UTILS}:TransferBackend": "FAKE",
    f"{UTILS}:KVClassType": "KVARGS MANAGER SENDER RECEIVER BOOTSTRAP_SERVER",
    "sglang.srt.environ:Envs": "SGLANG_DISAGG_STAGING_BUFFER SGLANG_RUST_SERVER "
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_WAITING_TIMEOUT "
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK "
    "SGLANG_MM_SKIP_COMPUTE_HASH",
}
"""Variables of classes that are read, among others."""

SCHEDULER_ATTRIBUTES: dict[str, str] = {
    f"{PREFILL}:PrefillBootstrapQueue": "token_to_kv_pool draft_token_to_kv_pool metadata_buffers scheduler",
    f"{DECODE}:DecodePreallocQueue": "token_to_kv_pool draft_token_to_kv_pool metadata_buffers scheduler "
    "transfer_queue kv_manager queue retracted_queue",
    f"{DECODE}:DecodeTransferQueue": "deferred_kv_release_timeout gloo_group queue _deferred_releases",
    f"{SCHEDULER}:Scheduler": "model_config req_to_token_pool sliding_window_size disagg_decode_transfer_queue "
    "disagg_decode_prealloc_queue disagg_prefill_bootstrap_queue device_module enable_overlap forward_stream pp_group "
    "schedule_stream tp_worker tree_cache",
    f"{REQUEST}:Req": "bootstrap_host bootstrap_port bootstrap_room cache_salt disagg_kv_sender disagg_prefill_dp_rank "
    "extend_end input_embeds kv logprob lora_id pending_bootstrap start_send_idx "
    "multimodal_inputs origin_input_ids output_ids positional_embed_overrides return_logprob sampling_params",
    f"{UTILS}:MetadataBuffers": "output_top_logprobs_val",
    f"{TREE}:UnifiedRadixCache": "linker",
    f"{LINKER}:UnifiedCacheLinkerWrapper": "cache_linker pending_offloads",
}
"""Attributes that are read, among others, and that methods of the class set. In schedulers."""

CONTROLLER_ATTRIBUTES: dict[str, str] = {f"{CONTROLLER}:DataParallelController": "_active_workers"}
"""The same in a controller of DP ranks."""

RELEASES: dict[str, dict[str, str | None]] = {
    "0.5.23": {},
    "0.5.22": {
        f"{BASE}:StateType": "-REQUEST_ROW",
        f"{BASE}:KVArgs": "-kv_layout",
        f"{BASE}:BaseKVManager": "-should_verify_kv_checksum",
        f"{LINKER}:UnifiedCacheLinker.offload": "@abstract self transfers",
        f"{LINKER}:UnifiedCacheLinker.record_offload_ready": None,
    },
    "0.5.21": {
        f"{CACHE}:checkpoint_kv_cache": None,
        f"{REQUEST}:Req": "-extend_end",
        f"{BASE}:KVArgs": "-host_state_data_ptrs -host_state_data_lens -host_state_item_lens -swa_kv_cache_layout",
        f"{BASE}:BaseKVSender": "-mark_prefill_complete",
        f"{BASE}:BaseKVSender.__init__": "@abstract self mgr bootstrap_addr bootstrap_room dest_tp_ranks pp_rank "
        "req_has_disagg_prefill_dp_rank=",
        f"{BASE}:BaseKVReceiver": "-is_abort_release_safe",
        f"{LINKER}:UnifiedCacheLinker.finish_layer_wise_loading": None,
        f"{TREE}:UnifiedRadixCache.path_device_indices": None,
        f"{PREFILL}:PrefillBootstrapQueue.pop_bootstrapped": "self return_failed_reqs= pp_good_rids= pp_bad_rids=",
        f"{TOKENIZER}:TokenizerManager._handle_batch_request": "async yield self obj request= request_rids=",
    },
}
"""From the newest release to the oldest, what differs from the release before it in this order."""
# fmt: on

SEAM = Seam(
    adapter="statelink-sglang",
    engine="sglang",
    title="SGLang",
    tables=(
        Table(Kind.MEMBERS, MEMBERS),
        Table(Kind.FIELDS, FIELDS),
        *methods(CLASSES),
        Table(Kind.VARIABLES, VARIABLES),
        Table(Kind.PARAMETERS, CALLS),
        Table(Kind.PARAMETERS, SCHEDULER_CALLS, SCHEDULER),
        Table(Kind.ATTRIBUTES, SCHEDULER_ATTRIBUTES, SCHEDULER),
        Table(Kind.PARAMETERS, CONTROLLER_CALLS, CONTROLLER),
        Table(Kind.ATTRIBUTES, CONTROLLER_ATTRIBUTES, CONTROLLER),
        Table(Kind.PARAMETERS, TOKENIZER_CALLS, TOKENIZER),
    ),
    releases=RELEASES,
    variable=Variable(VARIABLE, lambda: read_options("prefill").link),
)
"""All that the adapter uses of SGLang."""


def loaded(module: str) -> bool:
    """Whether this process has imported a module. A spawned scheduler imports its own before it loads plugins."""
    return module in sys.modules
