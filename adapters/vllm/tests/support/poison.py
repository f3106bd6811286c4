"""Fills blocks of vLLM's cache with NaN when a request gets them, and the whole cache before the first step.

An earlier request may have left anything there. So a byte that is read, and that nobody has computed, zeroed or moved
for this request, spoils its tokens. Every byte is 0xFF: that is NaN in float32, bf16 and FP8, and the largest scale.

vLLM's scheduler gives blocks to requests, and its workers fill them, before they zero or receive anything.
"""

from __future__ import annotations

from typing import Any

__all__ = ["install"]


def install() -> None:
    """Put it in place. Called once in a process, after vLLM was imported."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_worker import Worker

    give, schedule, execute = BlockPool.get_new_blocks, Scheduler.schedule, Worker.execute_model

    def given(self: Any, *args: Any) -> Any:
        blocks = give(self, *args)
        vars(self).setdefault("given", []).extend(block.block_id for block in blocks)
        return blocks

    def scheduled(self: Any, *args: Any, **more: Any) -> Any:
        output: Any = schedule(self, *args, **more)
        output.given = vars(self.kv_cache_manager.block_pool).pop("given", [])
        return output

    def executed(self: Any, output: Any) -> Any:
        if not hasattr(self, "filled"):
            self.filled = True
            _fill(self, range(self.cache_config.num_gpu_blocks))
        _fill(self, getattr(output, "given", ()))
        return execute(self, output)

    BlockPool.get_new_blocks = given
    Scheduler.schedule = scheduled
    Worker.execute_model = executed


def _fill(worker: Any, blocks: Any) -> None:
    """Fill these blocks of each layer. Its tensor has the blocks first, or the parts that attention makes of them."""
    import torch

    count = worker.cache_config.num_gpu_blocks
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        held = getattr(layer, "kv_cache", ())
        for cache in held if isinstance(held, (list, tuple)) else [held]:
            if not cache.numel():
                continue
            parts, rest = divmod(cache.shape[0], count)
            assert not rest, f"{tuple(cache.shape)} has no whole number of parts in each of {count} blocks"
            for block in blocks:
                part = cache[block * parts : (block + 1) * parts]
                if part.dtype.is_floating_point and part.dtype.itemsize > 1:
                    part.fill_(torch.nan)
                else:
                    part.view(torch.uint8).fill_(0xFF)
