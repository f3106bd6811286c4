"""Real SGLang servers with pipeline stages, on either side: five layers, split unequally."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.families import FAMILIES
from support.models import VOCABULARY, generate, make_llama
from support.servers import Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest"}
STAGES = ["--pp-size", "2"]
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}
"""The core of each rank of a server. SGLang wants to know it, and takes the first ones of the list."""
FIRST_LAYERS = "SGLANG_PP_LAYER_PARTITION"
"""SGLang's variable with the number of layers of each stage."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_llama(tmp_path_factory.mktemp("models") / "deep", layers=5)
    return made


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).sample(range(4, VOCABULARY), length)


@contextlib.contextmanager
def _pair(folder: Path, model: Path, prefill: list[str], decode: list[str], split: str = "2,3") -> Iterator[Pair]:
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    environment = {**CORES, FIRST_LAYERS: split}
    with running(
        Pair(folder, model, CONFIG, common=common, prefill=prefill, decode=decode, environment=environment)
    ) as pair:
        yield pair


def _right(pair: Pair, model: Path) -> None:
    """Requests of one chunk and of several, alone and ten at once."""
    for length in (1, 5, 40, 100):
        prompt = _prompt(length, length)
        first, second = pair.generate(prompt)
        expected = generate(model, prompt, 8)
        assert (first.tokens, second.tokens) == (expected[:1], expected)
    prompts = [_prompt(500 + seed, 20 + 7 * seed) for seed in range(10)]
    bodies = [pair.body(prompt, 6) for prompt in prompts]
    posted = [(Posted(pair.prefill, body), Posted(pair.decode, body)) for body in bodies]
    for prompt, (_, second) in zip(prompts, posted, strict=True):
        assert second.answer().tokens == generate(model, prompt, 6)


def _storm(pair: Pair, model: Path) -> None:
    """Aborts at any moment, on either side, and right requests after them."""
    draw = random.Random(11)
    posted: list[tuple[Posted, Posted]] = []
    for number in range(40):
        rid = f"storm-{number}"
        body = pair.body(_prompt(1000 + number, draw.randrange(10, 300)), draw.randrange(1, 20), rid=rid)
        posted.append((Posted(pair.prefill, body), Posted(pair.decode, body)))
        if number % 4 != 3:
            server: Any = getattr(pair, draw.choice(["prefill", "decode"]))
            delay = draw.choice([0.0, 0.05, 0.3, 1.0])
            threading.Timer(delay, server.ask, ["/abort_request", {"rid": rid}]).start()
        time.sleep(draw.choice([0.0, 0.0, 0.1]))
    for both in posted:
        for each in both:
            assert each.answer(200).status in (200, 400, 500, 503)
    for seed in range(4):
        prompt = _prompt(2000 + seed, 60)
        assert pair.generate(prompt)[1].tokens == generate(model, prompt, 8)


def _flushed(pair: Pair) -> None:
    """Both servers are idle, and hold the pages of no request: then SGLang flushes its caches."""
    for server in (pair.prefill, pair.decode):
        until = time.monotonic() + 60
        while (status := server.ask("/flush_cache", {}).status) != 200:
            assert time.monotonic() < until, status
            time.sleep(0.5)


def test_two_stages_of_prefill_and_one_of_decode(deep: Path, tmp_path: Path) -> None:
    with _pair(tmp_path, deep, STAGES, []) as pair:
        _right(pair, deep)
        # The last stage has the rows, which hold the first token.
        assert "moves kv of this prefill rank 0 of 2" in pair.prefill.logged()
        assert "moves kv, aux of this prefill rank 1 of 2" in pair.prefill.logged()
        _storm(pair, deep)
        _flushed(pair)
        prompt = _prompt(14, 100)
        for server in (pair.prefill, pair.decode):
            for path in ("/release_memory_occupation", "/resume_memory_occupation"):
                server.tell(path, tags=["kv_cache"])
            assert pair.generate(prompt)[1].tokens == generate(deep, prompt, 8)


def test_one_stage_of_prefill_and_two_of_decode(deep: Path, tmp_path: Path) -> None:
    with _pair(tmp_path, deep, [], STAGES, split="3,2") as pair:
        _right(pair, deep)
        for rank in (0, 1):
            assert f"moves kv, aux of this decode rank {rank} of 2" in pair.decode.logged()
        # No aborts here: if one comes between SGLang's stages of decode, one of them keeps the request for ever.
        _flushed(pair)


def test_two_stages_of_both(deep: Path, tmp_path: Path) -> None:
    with _pair(tmp_path, deep, STAGES, STAGES) as pair:
        _right(pair, deep)


def test_two_stages_of_prefill_and_two_ranks_of_decode(deep: Path, tmp_path: Path) -> None:
    with _pair(tmp_path, deep, STAGES, ["--tp", "2"]) as pair:
        _right(pair, deep)


def test_two_stages_of_two_dp_ranks_of_prefill(tmp_path: Path) -> None:
    """Four schedulers: each DP rank has two stages, which are an instance of their own. The room says which has it."""
    model = FAMILIES["deepseek"](tmp_path / "deepseek")
    ranks = ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--enable-dp-lm-head"]
    with _pair(tmp_path, model, [*STAGES, *ranks], [], split="1,2") as pair:
        _right(pair, model)
        for rank in ("0 of 2 (DP rank 0 of 2)", "1 of 2 (DP rank 1 of 2)"):
            assert f"of this prefill rank {rank}" in pair.prefill.logged()
        _storm(pair, model)
        _flushed(pair)
