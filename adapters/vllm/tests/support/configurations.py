"""What the connector reads of vLLM's configuration, for tests that make it without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def config_of(lookahead: int = 0, stages: int = 1, width: int = 1, replicas: int = 1) -> Any:
    """What the connector reads of a ``VllmConfig``."""
    given = {"backend": "tcp"}
    layer = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"), is_draft_layer=False
    )
    text = SimpleNamespace(num_hidden_layers=1, hidden_size=8, vocab_size=8)
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_connector_extra_config=given, engine_id="e"),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages,
            tensor_parallel_size=width,
            data_parallel_size=replicas,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        model_config=SimpleNamespace(
            multimodal_config=None,
            enable_sleep_mode=False,
            max_model_len=64,
            hf_text_config=text,
            hf_config=text,
            get_total_num_kv_heads=lambda: 4 * width,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(
            static_forward_context={f"model.layers.{number}.attn": layer for number in range(2)}
        ),
        speculative_config=None,
        num_prefill_lookahead_tokens=lookahead,
        shutdown_timeout=0,
        use_v2_model_runner=True,
        num_speculative_tokens=0,
    )
