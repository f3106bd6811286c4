"""Real SGLang servers whose prefill has a hierarchical cache: pages that come back from the host are moved, too."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.models import VOCABULARY, generate
from support.servers import Pair

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CACHE = [
    *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through", "--max-total-tokens", "1024"),
]


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).sample(range(4, VOCABULARY), length)


def test_pages_that_come_back_from_the_host_are_right(llama: Path, tmp_path: Path) -> None:
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    with running(Pair(tmp_path, llama, {"backend": "tcp", "verify": "digest"}, common=common, prefill=CACHE)) as pair:
        first = _prompt(77, 200)
        others = [_prompt(900 + seed, 200) for seed in range(8)]  # more than prefill has pages for
        for prompt in [first, first, *others]:
            assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
        again = [*first, *_prompt(3, 20)]
        prefill, decode = pair.generate(again)
        assert decode.tokens == generate(llama, again, 8)
        assert prefill.body["meta_info"]["cached_tokens_details"]["host"] >= 176, prefill
