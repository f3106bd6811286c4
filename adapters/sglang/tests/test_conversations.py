"""Conversations over real servers: prefill takes from decode what decode computed of earlier turns."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pytest
from engine_processes import running
from pages import commands
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from support.bootstrap import FOR_EVER
from support.families import FAMILIES
from support.models import generate, make_llama, make_windowed, prompt_of
from support.newest import OLDER
from support.servers import Alone, Pair, Posted

from statelink_sglang.backend import Bootstrap, KeyPair, Known

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.servers, pytest.mark.skipif(OLDER, reason="this SGLang loads no linker by its name")]

PAGE, ANSWER = 16, 64
CONFIG = {"backend": "tcp", "verify": "digest"}
COMMON = ["--page-size", str(PAGE), "--chunked-prefill-size", "64", "--max-total-tokens", "4096"]
MODELS: dict[str, Callable[[Path], Path]] = {"llama": make_llama, "windowed": make_windowed, **FAMILIES}
SWITCH = "--enable-unified-cache-external-linker"


def with_linker(
    folder: Path,
    model: Path,
    *,
    common: Sequence[str] = COMMON,
    lease: float = 300.0,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Pair:
    """A pair whose prefill takes from decode what decode's prefix cache holds."""
    (words,) = commands("sglang.md", SWITCH)
    config = {**json.loads(words.pop()), "linker_extra_config": {"lease": lease}}
    options = [SWITCH, *words, json.dumps(config)]
    cached = "--disaggregation-decode-enable-radix-cache"
    given = {"prefill": [*options, *prefill], "decode": [cached, *options, *decode]}
    return Pair(folder, model, CONFIG, common=common, environment=environment, **given)


def _until_offered(pair: Pair, said: list[int]) -> None:
    """Return once prefill can take what decode has computed of the beginning of a conversation, to the last page."""
    key = RadixKey(array("q", said[: len(said) // PAGE * PAGE]))
    last = get_storage_hash_str(key, page_size=PAGE)[-1]
    server = Bootstrap(f"127.0.0.1:{pair.bootstrap_port}", KeyPair())
    end = time.monotonic() + 60
    while not any(
        key and last.startswith(key) for *_, keys in server.news(Known("", 0, 0.0), 30.0)["offers"] for key in keys
    ):
        assert time.monotonic() < end, "decode does not offer it"
        time.sleep(0.02)
    pair.prefill.wait_logged("offers is used")


def _idle(pair: Pair) -> None:
    """Both servers give all of their memory back, which SGLang lets only an idle server do."""
    for server in (pair.prefill, pair.decode):
        end = time.monotonic() + 30
        while (status := server.ask("/flush_cache", b"").status) != 200:
            assert time.monotonic() < end, (server.name, status)
            time.sleep(0.1)


class Turn(NamedTuple):
    """An answer, and what prefill did not compute of its prompt.

    Attributes:
        prompt: All that was said before.
        tokens: The answer.
        cached: How many tokens of the prompt were in a cache.
    """

    prompt: list[int]
    tokens: list[int]
    cached: int


def _talk(ask: Callable[[list[int]], tuple[list[int], int]]) -> Iterator[Turn]:
    """Three conversations of three turns."""
    for seed, length in enumerate((200, 90, 330)):
        said = prompt_of(seed, length)
        for turn in range(3):
            tokens, cached = ask(said)
            yield Turn(said, tokens, cached)
            said = [*said, *tokens, *prompt_of(100 * seed + turn + 10, 30)]


class Case(NamedTuple):
    """A pair of servers.

    Attributes:
        family: The model.
        loaded: The fewest tokens that prefill takes from decode in all turns. A busy machine tells it some late, and
            SGLang keeps few recurrent states.
        prefill: Options of prefill.
        decode: Options of decode.
    """

    family: str
    loaded: int = 3 * (ANSWER - PAGE)
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


CASES = {
    "llama": Case("llama"),
    "latents": Case("deepseek"),
    "windows": Case("windowed"),
    "recurrent": Case("kimi", loaded=0),
    "llama-2-1": Case("llama", prefill=("--tp", "2")),
    "latents-1-2": Case("deepseek", decode=("--tp", "2")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.shows("conversations whose next turn takes from decode what decode computed")
def test_prefill_computes_only_what_nobody_has_computed(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = MODELS[case.family](tmp_path / "model")
    environment = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
    with Alone(tmp_path, model, COMMON, environment) as alone:

        def ask_one(said: list[int]) -> tuple[list[int], int]:
            answer = alone.generate(said, ANSWER)
            return answer.tokens, answer.body["meta_info"]["cached_tokens"]

        expected = list(_talk(ask_one))
    if case.prefill or case.decode:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    pair = with_linker(tmp_path, model, prefill=case.prefill, decode=case.decode, environment=environment)
    with running(pair):
        loaded, turns = 0, iter(expected)

        def ask_pair(said: list[int]) -> tuple[list[int], int]:
            nonlocal loaded
            cached = next(turns).cached
            if cached and case.loaded:
                _until_offered(pair, said[:cached])
            prefill, decode = pair.generate(said, ANSWER)
            assert prefill.status == decode.status == 200, (prefill, decode)
            known = prefill.body["meta_info"]
            loaded += (known["cached_tokens_details"] or {}).get("host", 0)
            return decode.tokens, known["cached_tokens"]

        for told, right in zip(_talk(ask_pair), expected, strict=True):
            assert told.tokens == right.tokens
            assert told.cached <= right.cached
        assert loaded >= case.loaded
        _idle(pair)


def test_a_history_that_differs_and_a_decode_that_dies_cost_only_the_time(llama: Path, tmp_path: Path) -> None:
    with running(with_linker(tmp_path, llama)) as pair:
        said = prompt_of(1, 120)

        def answered(said: list[int]) -> int:
            prefill, decode = pair.generate(said, ANSWER)
            assert decode.tokens == generate(llama, said, ANSWER)
            return int((prefill.body["meta_info"]["cached_tokens_details"] or {}).get("host", 0))

        answered(said)
        first = [*said, *generate(llama, said, ANSWER)]
        _until_offered(pair, first[:176])
        # A template leaves a part of the answer out: what is before that part is the same.
        assert answered([*first[:150], *first[170:], *prompt_of(2, 20)]) == 144 - 112
        pair.decode.kill()
        pair.decode = pair.start("decode", "another")
        pair.decode.wait_ready()
        assert answered([*first, *prompt_of(3, 20)]) == 0
        _idle(pair)


@pytest.mark.parametrize("family", ["llama", "windowed"])
def test_other_requests_get_the_memory_that_decode_offers(family: str, tmp_path: Path) -> None:
    """The lease is longer than the test, and decode has memory for three of these requests."""
    model = MODELS[family](tmp_path / "model")
    common = [*COMMON[:-1], "1024"]
    with running(with_linker(tmp_path, model, common=common, lease=FOR_EVER)) as pair:
        for seed in range(12):
            said = prompt_of(seed, 250)
            assert pair.generate(said, ANSWER)[1].tokens == generate(model, said, ANSWER)
        together = [prompt_of(seed, 200) for seed in range(20, 26)]
        bodies = [pair.body(said, ANSWER) for said in together]
        posted = [(Posted(pair.prefill, body), Posted(pair.decode, body)) for body in bodies]
        for said, (_, decode) in zip(together, posted, strict=True):
            assert decode.answer().tokens == generate(model, said, ANSWER)
        _idle(pair)
