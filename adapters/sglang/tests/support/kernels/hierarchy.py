"""What the hierarchical cache calls of a card: streams, and copies between the host's memory and the pool."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["after_imports"]


def after_imports() -> None:
    """Host memory needs no registration, and copies are done when they return."""
    import sglang.srt.mem_cache.pool_host.base as base
    import sglang.srt.mem_cache.pool_host.common as common
    import sglang.srt.mem_cache.pool_host.mha as pages

    settings: Any = base
    settings.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # SGLang leaves 10 GiB to others
    host: Any = common
    host._cuda_host_register = lambda *given, **named: None  # noqa: SLF001
    copies: Any = pages
    copies.transfer_kv_direct = transfer_kv_direct
    stream: Any = torch.cpu.Stream
    for name in ("synchronize", "wait_stream", "wait_event"):
        if not hasattr(stream, name):
            setattr(stream, name, lambda self, *given: None)
    if not hasattr(stream, "record_event"):
        stream.record_event = lambda self, event=None: event or torch.cpu.Event()
    if not hasattr(stream, "query"):
        stream.query = lambda self: True


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows of some layers from the pool to the host, or back."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]
