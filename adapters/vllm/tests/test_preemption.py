"""An engine with too few blocks for its requests takes them away from some, and computes those again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_processes import free_port, running
from support.engines import PREFILL, Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest"}
BLOCKS = 40
FEW = {
    "kv_cache_memory_bytes": BLOCKS * 3 * 2 * 32 * 2 * 32 * 4,  # layers, heads, tokens, key and value, 4 bytes
    "long_prefill_token_threshold": 16,  # so that several requests are computed at once
    "scheduler_reserve_full_isl": False,
}


@pytest.mark.shows("preemption on prefill")
@pytest.mark.shows("no block of vLLM's pool is lost")
@pytest.mark.parametrize("at_once", [False, True], ids=["serial", "at once"])
def test_requests_that_prefill_preempts_arrive_whole(llama: Path, tmp_path: Path, at_once: bool) -> None:
    """Behind a router that asks both engines at once, some of their blocks are read when they are preempted."""
    listen = f"tcp://127.0.0.1:{free_port()}"
    config = {**CONFIG, **({"peers": {"prefill-0": [listen]}} if at_once else {})}
    sides = {"prefill": {"engine_id": "prefill-0", "more": {"listen": listen, "peers": {}}}} if at_once else {}
    common = {"max_model_len": 640, "enable_prefix_caching": False}  # each request is computed from its first token
    with running(Pair(tmp_path, llama, config, own=(FEW, {}), policy="fail", **sides, **common)) as pair:
        assert pair.prefill.free < BLOCKS
        prompts = {f"many{n}": prompt_of(200 + n, 450 + 9 * n) for n in range(6)}  # 15 or 16 blocks each
        for name, prompt in prompts.items():
            said = {"transfer_id": name} if at_once else {}
            if at_once:
                pair.decode.add(name, prompt, 8, {"do_remote_prefill": True, "remote_engine_id": "prefill-0", **said})
            pair.prefill.add(name, prompt, 1, {**PREFILL, **said})
        for name, prompt in prompts.items():
            params = pair.prefill.result(name).params
            if not at_once:
                pair.decode.add(name, prompt, 8, params)
        found = {name: pair.decode.result(name).tokens for name in prompts}
        assert pair.prefill.ask()["preempted"] > 0
        assert found == {name: pair.alone(prompt) for name, prompt in prompts.items()}
        assert pair.moved()[0] == len(prompts)
        assert (max(pair.prefill.ask()["chunks"]) > 1) == at_once
        pair.settled()


@pytest.mark.shows("preemption on decode")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_requests_that_decode_preempts_are_computed_there(llama: Path, tmp_path: Path) -> None:
    """Their state came once. It is gone with their blocks, and prefill has given its own back."""
    common = {"max_model_len": 640, "enable_prefix_caching": False}
    few = {"kv_cache_memory_bytes": FEW["kv_cache_memory_bytes"]}
    with running(Pair(tmp_path, llama, CONFIG, own=({}, few), policy="fail", **common)) as pair:
        prompts = {f"many{n}": prompt_of(300 + n, 90 + 9 * n) for n in range(6)}  # 8 to 10 blocks each at the end
        for name, prompt in prompts.items():
            pair.prefill.add(name, prompt, 1, dict(PREFILL))
        for name, prompt in prompts.items():
            pair.decode.add(name, prompt, 160, pair.prefill.result(name).params)
        found = {name: pair.decode.result(name).tokens for name in prompts}
        assert pair.decode.ask()["preempted"] > 0
        assert found == {name: pair.alone(prompt, 160) for name, prompt in prompts.items()}
        assert pair.moved()[0] == len(prompts)
        pair.settled()
