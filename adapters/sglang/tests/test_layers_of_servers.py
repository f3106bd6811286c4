"""Real SGLang servers whose layers leave while the forward pass runs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.late_layers import GROUP, KEPT, LATE, SEEN
from support.models import VOCABULARY, generate, make_llama
from support.servers import Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(4, VOCABULARY), k=length)


@pytest.mark.parametrize("more", [(), ("--chunked-prefill-size", "64")])
def test_tokens_with_layers_whose_bytes_come_late(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Several requests at once, that share a prefix, so that prefill's cache gives pages back while they are read."""
    llama = make_llama(tmp_path / "llama", layers=8)
    seen = tmp_path / "seen"
    config = {"backend": "tcp", "verify": "digest", "options": {"same_host_copy": False}}
    environment = {LATE: "0.01", SEEN: str(seen)}
    with running(Pair(tmp_path, llama, config, common=["--page-size", "16", *more], environment=environment)) as pair:
        lengths = (1, 15, 16, 17, 100, 333)
        for seed, length in enumerate(lengths):
            prompt = _prompt(seed, length)
            assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
        assert seen.read_text().count(GROUP) >= 5 * len(lengths)
        whole = _prompt(8, 96)  # of its last page, prefill's cache keeps the first copy
        for _ in range(2):
            assert pair.generate(whole)[1].tokens == generate(llama, whole, 8)
        assert KEPT in seen.read_text()
        prompts = [_prompt(9, 64) + _prompt(seed, 100) for seed in range(10, 16)]
        posted = [[Posted(server, body) for server in (pair.prefill, pair.decode)] for body in map(pair.body, prompts)]
        for (_, answer), prompt in zip(posted, prompts, strict=True):
            assert answer.answer().tokens == generate(llama, prompt, 8)
