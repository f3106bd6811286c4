"""Prefill with too few blocks for its requests takes them away from some, and computes those again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.engines import PREFILL, Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

BLOCKS = 40
FEW = {
    "kv_cache_memory_bytes": BLOCKS * 3 * 2 * 32 * 2 * 32 * 4,  # layers, heads, tokens, key and value, 4 bytes
    "long_prefill_token_threshold": 16,  # so that several requests are computed at once
    "scheduler_reserve_full_isl": False,
}


@pytest.mark.shows("preemption on prefill")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_requests_that_prefill_preempts_arrive_whole(llama: Path, tmp_path: Path) -> None:
    config = {"backend": "tcp", "verify": "digest"}
    common = {"max_model_len": 640, "enable_prefix_caching": False}  # each request is computed from its first token
    with running(Pair(tmp_path, llama, config, own=(FEW, {}), policy="fail", **common)) as pair:
        assert pair.prefill.free < BLOCKS
        prompts = {f"many{n}": prompt_of(200 + n, 450 + 9 * n) for n in range(6)}  # 15 or 16 blocks each
        for name, prompt in prompts.items():
            pair.prefill.add(name, prompt, 1, dict(PREFILL))
        for name, prompt in prompts.items():
            pair.decode.add(name, prompt, 8, pair.prefill.result(name).params)
        found = {name: pair.decode.result(name).tokens for name in prompts}
        assert pair.prefill.ask()["preempted"] > 0
        assert found == {name: pair.alone(prompt) for name, prompt in prompts.items()}
        assert pair.moved()[0] == len(prompts)
        pair.settled()
