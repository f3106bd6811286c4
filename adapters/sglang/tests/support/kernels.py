"""Stands in for the kernels that SGLang has for no CPU of this kind, in plain torch."""

from __future__ import annotations

from . import events

__all__ = ["install"]


def install() -> None:
    """Put every kernel where SGLang looks for it, in this process."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    events.install()
    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
