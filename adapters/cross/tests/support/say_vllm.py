"""Prints what vLLM's adapter describes of caches as vLLM lays them out: see `say_sglang`.

A script for vLLM's environment. The tests of its adapter have to be on the path. The models are those of the other.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import torch
from support.caches import attention, make_cache, model_of, recurrent
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from statelink import state
from statelink_vllm.connector import describe_cache

MODEL = "tiny@1"
HEADS, BLOCK, WINDOW = 4, 32, 33


def groups_of(kind: str) -> list[tuple[Any, tuple[int, ...]]]:
    """vLLM's groups of layers. It gives every group as many layers."""
    full = attention(HEADS, BLOCK)
    if kind == "mha":
        return [(full, (0, 1))]
    if kind == "mla":
        return [(MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=40, dtype=torch.bfloat16), (0, 1))]
    if kind in ("swa", "chunked"):
        local = attention(HEADS, BLOCK, **{"window" if kind == "swa" else "chunk": WINDOW})
        return [*((local, (layer,)) for layer in (0, 1, 3)), (full, (2,))]
    states = recurrent("MAMBA2", (3, 96), (4, 16, 8))
    return [*((states, (layer,)) for layer in (0, 1, 2)), (full, (3,))]


def main(*kinds: str) -> None:
    for kind in kinds:
        cache = make_cache(groups_of(kind))
        made, _ = describe_cache(cache.config, cache.tensors, model_of(heads=HEADS, groups=2))
        print("state:", msgspec.msgpack.encode(state.describe("vllm", made, model=MODEL)).hex())


if __name__ == "__main__":
    main(*sys.argv[1:])
