"""Real engines that differ: another width of tensor parallelism, or another block size, on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.engines import Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest", "liveness": 30.0}
"""vLLM's ranks spin while they wait for each other. With more of them than cores, a process may be silent for long."""


def hand_some(pair: Pair) -> None:
    """Requests whose tokens are those of one engine. Decode of these pairs computes no prompt itself."""
    for length in (1, 33, 100, 333):
        prompt = prompt_of(length, length)
        _, second = pair.hand(prompt)
        assert second.why == "length", pair.decode.logged()[-6000:]
        assert second.tokens == pair.alone(prompt)
    assert "is computed here" not in pair.decode.logged()
    pair.settled()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
@pytest.mark.shows("TP {prefill} to TP {decode}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_ranks_of_one_side_serve_those_of_the_other(prefill: int, decode: int, llama: Path, tmp_path: Path) -> None:
    own = {"tensor_parallel_size": prefill}, {"tensor_parallel_size": decode}
    with running(Pair(tmp_path, llama, CONFIG, own=own, policy="fail")) as pair:
        for engine, width in ((pair.prefill, prefill), (pair.decode, decode)):
            assert all(f"of rank {rank} of {width}; its link listens" in engine.logged() for rank in range(width))
        hand_some(pair)


@pytest.mark.parametrize(("prefill", "decode"), [(32, 64), (64, 32)])
@pytest.mark.shows("blocks of {prefill} tokens to blocks of {decode}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_tokens_move_between_blocks_of_two_sizes(prefill: int, decode: int, llama: Path, tmp_path: Path) -> None:
    """vLLM's attention on the CPU takes multiples of 32. Its stand-ins keep the keys of a head before its values."""
    config = {**CONFIG, "vllm": {"pages": {"CPU_ATTN": "halves"}}}
    own = {"block_size": prefill}, {"block_size": decode}
    with running(Pair(tmp_path, llama, config, own=own, policy="fail")) as pair:
        assert pair.prefill.free != pair.decode.free
        hand_some(pair)
        assert pair.moved()[0] == 4


@pytest.mark.parametrize(("prefill", "decode"), [(32, 256), (256, 32)])
@pytest.mark.shows("blocks of two sizes beside recurrent layers, and NaN behind the last token that comes")
def test_what_is_behind_the_last_token_is_not_read(prefill: int, decode: int, hybrid: Path, tmp_path: Path) -> None:
    """vLLM makes pages of attention as large as those of states, so that 32 is rather 128."""
    config = {**CONFIG, "vllm": {"pages": {"CPU_ATTN": "halves"}}}
    own = {"block_size": prefill}, {"block_size": decode}
    with running(Pair(tmp_path, hybrid, config, own=own, policy="fail")) as pair:
        assert pair.prefill.free != pair.decode.free
        for length in (1, 33, 127, 128, 129, 333):
            pair.check(prompt_of(length, length))
        pair.settled()
