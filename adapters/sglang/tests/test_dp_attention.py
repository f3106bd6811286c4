"""Real SGLang servers with DP attention: latents and experts, whose ranks compute some layers together."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.families import FAMILIES
from support.models import generate, prompt_of
from support.servers import Pair, Posted
from support.stages import RANKS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = FAMILIES["deepseek"](tmp_path_factory.mktemp("models") / "deepseek")
    return made


@pytest.mark.parametrize(
    ("prefill", "decode", "balance"),
    [
        (RANKS, RANKS, "round_robin"),
        (RANKS, [], "follow_bootstrap_room"),
        ([], RANKS, ""),
    ],
    ids=["2-2", "2-1", "1-2"],
)
def test_the_tokens_are_right(
    deepseek: Path, tmp_path: Path, prefill: list[str], decode: list[str], balance: str
) -> None:
    common = ["--page-size", "16", "--chunked-prefill-size", "64"]
    chosen = ["--load-balance-method", balance] if balance else []
    config = {"backend": "tcp", "verify": "digest"}
    with running(
        Pair(tmp_path, deepseek, config, common=common, prefill=[*prefill, *chosen], decode=decode, environment=CORES)
    ) as pair:
        for length in (5, 40, 100):
            prompt = prompt_of(length, length)
            assert pair.generate(prompt)[1].tokens == generate(deepseek, prompt, 8)
        prompts = [prompt_of(500 + seed, 20 + 7 * seed) for seed in range(10)]
        bodies = [pair.body(prompt, 6) for prompt in prompts]
        posted = [(Posted(pair.prefill, body), Posted(pair.decode, body)) for body in bodies]
        assert [second.answer().tokens for _, second in posted] == [generate(deepseek, each, 6) for each in prompts]
        if prefill and decode:
            _storm(pair)
            for seed in range(4):
                prompt = prompt_of(2000 + seed, 60)
                assert pair.generate(prompt)[1].tokens == generate(deepseek, prompt, 8)


def _storm(pair: Pair) -> None:
    """Aborts at any moment, on either side."""
    draw = random.Random(11)
    posted = []
    for number in range(30):
        rid = f"storm-{number}"
        body = pair.body(prompt_of(1000 + number, draw.randrange(10, 200)), draw.randrange(1, 12), rid=rid)
        posted.append((Posted(pair.prefill, body), Posted(pair.decode, body)))
        if number % 4 != 3:
            server: Any = getattr(pair, draw.choice(["prefill", "decode"]))
            threading.Timer(draw.choice([0.0, 0.3, 1.0]), server.ask, ["/abort_request", {"rid": rid}]).start()
        time.sleep(draw.choice([0.0, 0.0, 0.1]))
    for both in posted:
        for each in both:
            assert each.answer(200).status in (200, 400, 500, 503)
