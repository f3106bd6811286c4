"""SGLang's classes of pools: which there are, and why the tests do not make some of them on a CPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOTS = {"KVCache", "MambaPool", "ReqToTokenPool"}
"""Whoever inherits from one of these is a pool, whatever it is called. So is each class whose name ends with "Pool"."""

# Pools of other devices (sglang/srt/hardware_backend) are not looked at: they need torch_npu or mlx. Nor are pools of
# hierarchical caches (files with "host" in their names, storage), and allocators, which hold no state.
LEFT_OUT = ("host", "storage", "allocator")

BASE = "a base class without buffers"
PART = "a part of another pool, which SGLang never gives a queue"
OPTION = "belongs to an option that the adapter refuses at start"
SLOTS = "says which slots a request has; what is in them is held by pools that are made"
OTHER = "holds no state that SGLang moves between servers"
V4 = "test_deepseek_v4.py makes it, in every variant"
UNLISTED = "SGLang itself cannot list its buffers: its method raises an error"

NOT_MADE = {
    "KVCache": BASE,
    "BaseSWAKVPool": BASE,
    "NoOpMHATokenToKVPool": UNLISTED,
    "MHATokenToKVPoolFP4": UNLISTED,
    "PageMajorMHATokenToKVPool": "SGLang has taken its layout out: its constructor raises an error",
    "MHATokenToKOnlyPool": PART,
    "MiniMaxM3Nvfp4IndexKPool": PART,
    "MiniMaxM3Nvfp4MainKVPool": PART,
    "MiniMaxM3Nvfp4KVPool": "refused: it has one buffer for keys and values, whose layout it does not state",
    "HiSparseC4DevicePool": OPTION,
    "HiSparseDSATokenToKVPool": OPTION,
    "HiSparseMHAMainPool": OPTION,
    "LayerSplitDSATokenToKVPool": OPTION,
    "PageInterleaveMHATokenToKVPool": OPTION,
    "PageInterleaveMLATokenToKVPool": OPTION,
    "PageInterleaveDSATokenToKVPool": OPTION,
    "UnifiedKVPool": OPTION,
    "UnifiedMHATokenToKVPool": OPTION,
    "UnifiedMLATokenToKVPool": OPTION,
    "UnifiedMambaPool": OPTION,
    "UnifiedHybridReqToTokenPool": OPTION,
    "UnifiedHybridLinearKVPool": OPTION,
    "UnifiedSWAKVPool": OPTION,
    "UnifiedDraftKVPool": OPTION,
    "UnifiedDraftSWAKVPool": OPTION,
    "UnifiedDraftMambaPool": OPTION,
    "CompressStatePool": PART,
    "DeepSeekV4SingleKVPool": PART,
    "DeepSeekV4UniformFP8KVPool": PART,
    "DeepSeekV4IndexerPool": PART,
    "DeepSeekV4UnifiedKVPool": PART,
    "DeepSeekV4TokenToKVPool": V4,
    "ReqToTokenPool": SLOTS,
    "DecodeReqToTokenPool": SLOTS,
    "HybridMambaDecodeReqToTokenPool": SLOTS,
    "ShortConvPool": "belongs to recurrent layers with embeddings for each layer; the tests have no such shape",
    "NGramPool": "belongs to recurrent layers with embeddings for each layer; the tests have no such shape",
    "MambaCheckpointPool": OTHER,
    "EmbeddingPool": OTHER,
}
"""Why the tests make no pool of a class, by its name."""


def existing() -> set[str]:
    """Names of the pool classes of the installed SGLang. Sources are read, since not every module can be imported."""
    import sglang.srt

    root = Path(next(iter(sglang.srt.__path__)))
    bases: dict[str, set[str]] = {}
    for file in sorted([*root.glob("mem_cache/**/*.py"), *root.glob("disaggregation/*.py")]):
        if not any(word in file.relative_to(root).as_posix() for word in LEFT_OUT):
            bases |= dict(_classes(file))
    return {name for name in bases if name.endswith("Pool") or _inherits(name, bases)}


def made(kind: Any) -> set[str]:
    """Names of the classes of which pools of a kind are, and of the pools that they hold."""
    from .pools import make

    pools = make(kind).pools
    held = [pools.pages, pools.requests]
    held += [getattr(pools.pages, name, None) for name in ("full_kv_pool", "swa_kv_pool", "mamba_pool")]
    return {type(each).__name__ for each in held if each is not None}


def _classes(file: Path) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name, {ast.unparse(each).rpartition(".")[2] for each in node.bases}


def _inherits(name: str, bases: dict[str, set[str]]) -> bool:
    return name in ROOTS or any(_inherits(each, bases) for each in bases.get(name, ()) if each != name)
