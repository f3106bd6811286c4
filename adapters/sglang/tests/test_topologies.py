"""Two real SGLang servers in other shapes: pages of one token, a sliding window, unequal TP, several DP ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.models import generate, make_windowed, prompt_of
from support.servers import Pair, Posted

from statelink_sglang.backend import SEAM

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest"}
"""With digests, a request succeeds only if the same bytes are on both sides."""

TEXTS = () if SEAM.release() == "0.5.21" else ("7",)
"""Rooms as text. SGLang 0.5.21 takes the number that is in one."""
BIND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""The core of each rank: SGLang wants to know it where there are several."""


def test_pages_of_one_token_and_forwards_that_run_before_decode_has_asked(llama: Path, tmp_path: Path) -> None:
    """Optimistic prefill. SGLang computes about half of the requests twice, by a switch for its own tests."""
    with running(
        Pair(
            tmp_path,
            llama,
            CONFIG,
            common=["--page-size", "1", "--chunked-prefill-size", "32"],
            prefill=["--optimistic-prefill-attempts", "2"],
            environment={"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"},
        )
    ) as pair:
        for length in (1, 40, 100):
            prompt = list(range(5, 5 + length))
            assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
        late = []
        for number in range(8):
            prompt = list(range(number + 10, number + 90))
            body = pair.body(prompt)
            late.append((prompt, body, Posted(pair.prefill, body)))
        for prompt, body, first in late:
            assert not first.answered(0.2)  # decode has not asked
            assert Posted(pair.decode, body).answer().tokens == generate(llama, prompt, 8)
            assert first.answer().status == 200
        assert "optimistic prefill" in pair.prefill.logged()


def test_a_sliding_window(tmp_path: Path) -> None:
    """More tokens in all than the pool of windows has: a slot that is read in the wrong pool is beyond its end."""
    model = make_windowed(tmp_path / "windowed", window=32)
    with running(Pair(tmp_path, model, CONFIG, common=["--page-size", "16", "--chunked-prefill-size", "32"])) as pair:
        for number, length in enumerate((24, 31, 32, 33, 40, 100, 400, 400, 400, 400, 400)):
            prompt = prompt_of(number, length)
            assert pair.generate(prompt, 24)[1].tokens == generate(model, prompt, 24), length
        assert "moves kv, swa, aux of this" in pair.decode.logged()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_unequal_tensor_parallelism(llama: Path, tmp_path: Path, prefill: int, decode: int) -> None:
    with running(
        Pair(
            tmp_path,
            llama,
            CONFIG,
            common=["--page-size", "16", "--chunked-prefill-size", "32"],
            prefill=["--tp", str(prefill)],
            decode=["--tp", str(decode)],
            environment=BIND,
        )
    ) as pair:
        for length in (40, 100):
            prompt = list(range(5, 5 + length))
            assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)


def test_dp_ranks_without_dp_attention(llama: Path, tmp_path: Path) -> None:
    ranks = ["--dp", "2"]
    common = ["--page-size", "16"]
    with running(Pair(tmp_path, llama, CONFIG, common=common, prefill=ranks, decode=ranks, environment=BIND)) as pair:
        for room in (1000, 1001, 1002, 1003):
            prompt = list(range(5 + room % 100, 65 + room % 100))
            first, second = pair.generate(prompt, bootstrap_room=room)
            assert first.status == 200
            assert second.tokens == generate(llama, prompt, 8)
            for server in (pair.prefill, pair.decode):  # SGLang's controller ends for such rooms
                for none in (None, [room], *TEXTS):
                    assert server.ask("/generate", pair.body(prompt, bootstrap_room=none)).status == 400
        for server in (pair.prefill, pair.decode):
            for rank in (0, 1):
                assert f"(DP rank {rank} of 2)" in server.logged()
