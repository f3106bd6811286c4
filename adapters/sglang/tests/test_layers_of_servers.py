"""Real SGLang servers whose layers leave while the forward pass runs."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support import late_layers
from support.families import FAMILIES
from support.forks import INSTALLED
from support.late_layers import GROUP, KEPT, LATE, SEEN
from support.models import VOCABULARY, generate, make_llama
from support.servers import Pair, Posted
from support.stages import RANKS, STAGES, pair_of

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
    environment = {INSTALLED: late_layers.__name__, LATE: "0.01", SEEN: str(seen)}
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


@pytest.mark.parametrize(
    ("family", "prefill", "groups"),
    [
        ("llama", ["--tp", "2"], [16, 16]),
        ("llama", STAGES, [8, 12]),
        ("deepseek", [*RANKS, "--load-balance-method", "round_robin"], [6, 6]),
    ],
    ids=["tp", "pp", "dp attention"],
)
def test_each_rank_sends_its_own_layers(tmp_path: Path, family: str, prefill: list[str], groups: list[int]) -> None:
    """Four requests: those of TP have four groups of five layers, those of stages two of two, and three of three."""
    llama = family == "llama"
    model = make_llama(tmp_path / family, layers=5) if llama else FAMILIES[family](tmp_path / family)
    seen = tmp_path / "seen"
    environment = {INSTALLED: late_layers.__name__, SEEN: str(seen)}
    with pair_of(tmp_path, model, prefill, [], environment=environment) as pair:
        for seed in range(4):
            prompt = _prompt(seed, 10)
            assert pair.generate(prompt)[1].tokens == generate(model, prompt, 8)
    counted = Counter(line for line in seen.read_text().split() if line.startswith(GROUP))
    assert sorted(counted.values()) == groups
