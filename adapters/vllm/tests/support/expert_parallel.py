"""Stands in for what vLLM's CPU platform lacks where several ranks share the experts of a model.

Each rank computes the tokens of all ranks with its own experts, and all ranks add up what they made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

__all__ = ["install"]


def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """The tensors of all ranks, one behind the other. A rank may have more rows than another."""
    if isinstance(given, list):
        return [all_gatherv(self, each, dim, sizes) for each in given]
    rows = sizes or [len(given)] * self.world_size
    padded = given.new_zeros(max(rows), *given.shape[1:])
    padded[: len(given)] = given
    parts = [torch.empty_like(padded) for _ in rows]
    distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def reduce_scatterv(self: Any, given: Any, dim: int = -1, sizes: Sequence[int] | None = None) -> Any:
    """This rank's rows of the sum over all ranks."""
    added = given.clone()
    distributed.all_reduce(added, group=self.device_group)
    rows = sizes or [len(given) // self.world_size] * self.world_size
    return added.split(list(rows))[self.rank_in_group].clone()


def install() -> None:
    """Put all of it in place. Called once in a process, after vLLM was imported."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    compute = CPUUnquantizedExperts.apply

    def compute_own(self: Any, *, topk_ids: Any, expert_map: Any, **given: Any) -> None:
        # The kernel knows the experts of this rank by their numbers here, and skips those of other ranks, -1.
        chosen = topk_ids if expert_map is None else expert_map[topk_ids.long()].to(topk_ids.dtype)
        compute(self, topk_ids=chosen, expert_map=expert_map, **given)

    CPUUnquantizedExperts.apply = compute_own
