"""DeepSeek V4 in SGLang's servers: a pair has the tokens and log-probabilities of one server, and nothing can be lost.

Tokens alone would miss the rows of 128 tokens: a tiny model soon repeats itself. What decode names for a request is
poisoned before (`support/poison.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.families import FAMILIES, say_few_words
from support.models import log_probabilities, prompt_of
from support.newest import OLDER
from support.poison import LOST, POISONED
from support.servers import Alone, Answer, Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(OLDER, reason="the stand-ins for its kernels are for SGLang's newest release"),
]

CONFIG = {"backend": "tcp", "verify": "digest"}
COMMON = [
    *("--attention-backend", "dsv4", "--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3", "--page-size", "256"),
    *("--chunked-prefill-size", "256", "--max-total-tokens", "8192", "--swa-full-tokens-ratio", "0.5"),
    *("--disable-shared-experts-fusion", "--skip-tokenizer-init"),
]
NO_CARD = dict.fromkeys(
    (
        *("SGLANG_OPT_USE_TILELANG_MHC_PRE", "SGLANG_OPT_USE_TILELANG_MHC_POST", "SGLANG_OPT_DEEPGEMM_HC_PRENORM"),
        *("SGLANG_OPT_USE_FLASHINFER_MHC", "SGLANG_OPT_FP8_WO_A_GEMM", "SGLANG_OPT_USE_FUSED_HASH_TOPK"),
    ),
    "0",
)
"""Variables that choose kernels of a card, where SGLang has plain ones."""
DRAFT = [
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
]
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
LENGTHS = (1, 3, 4, 7, 40, 122, 127, 128, 129, 250, 255, 256, 257, 381, 515, 700)
"""Around each group, window, page and chunk; some cross the end of one while decode goes on."""
CROSSING = (7, 122, 250, 381)
COUNT = 20
PARTS = {
    "rows of 4 tokens": "kv 0 2",
    "index keys": "kv 2 4",
    "rows of 128 tokens": "kv 4 6",
    "windows": "swa 0 6",
    "open groups of 4": "swa 6 8",
    "the indexer's open groups": "swa 8 10",
    "open groups of 128": "c128_state",
}
"""What decode can lose: SGLang's list, and the buffers of it, for layers with the ratios 0, 0, 4, 128, 4 and 128."""


def _prompt(length: int) -> list[int]:
    return [token for part in range(0, length, 500) for token in prompt_of(length + part, min(500, length - part))]


def _told(answer: Answer) -> tuple[list[int], list[float]]:
    """The tokens, and how likely each was."""
    return answer.tokens, [each[0] for each in answer.body["meta_info"]["output_token_logprobs"]]


def _alike(told: tuple[list[int], list[float]], right: tuple[list[int], list[float]]) -> bool:
    """The same as far as the tokens are, and nearly as likely where they part.

    In a batch, and on two ranks, sums in bfloat16 are rounded otherwise. So another token may be the likeliest.
    """
    same = next((n for n, each in enumerate(zip(told[0], right[0], strict=True)) if each[0] != each[1]), COUNT)
    return same > 0 and told[1][: same + 1] == pytest.approx(right[1][: same + 1], abs=0.3)


def _drafted(answer: Answer) -> tuple[list[int], dict[str, Any]]:
    """The tokens, and what the server says of its drafts."""
    return answer.tokens, {name: value for name, value in answer.body["meta_info"].items() if name.startswith("spec_")}


def _near(told: tuple[list[int], list[float]]) -> Any:
    return told[0], pytest.approx(told[1], abs=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = FAMILIES["deepseek-v4"](tmp_path_factory.mktemp("models") / "v4")
    return made


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[list[int], list[float]]]:
    """What one server says after each prompt."""
    with Alone(tmp_path_factory.mktemp("alone"), model, COMMON, NO_CARD) as alone:
        return {n: _told(alone.generate(_prompt(n), COUNT, return_logprob=True)) for n in LENGTHS}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("lost") / "lost"
    file.touch()
    return file


@pytest.fixture(scope="module")
def pair(model: Path, lost: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    environment = {**NO_CARD, LOST: str(lost)}
    with running(Pair(tmp_path_factory.mktemp("pair"), model, CONFIG, common=COMMON, environment=environment)) as made:
        assert POISONED in made.decode.logged()
        yield made


def _ask(pair: Pair, length: int) -> tuple[list[int], list[float]]:
    return _told(pair.generate(_prompt(length), COUNT, return_logprob=True)[1])


def test_one_server_says_what_transformers_says(model: Path, right: dict[int, Any]) -> None:
    """As far as keys in FP8 and sums in bfloat16 let it, and where both choose the same groups of tokens."""
    for length, (tokens, said) in right.items():
        theirs = log_probabilities(model, _prompt(length), tokens)
        differences = [abs(a - b) for a, b in zip(said, theirs, strict=True)]
        assert sum(differences) / len(differences) < 0.25, length


def test_a_pair_says_what_one_server_says(pair: Pair, right: dict[int, Any]) -> None:
    assert "Statelink backend 'tcp' moves dsv4, swa, c128_state, aux of this" in pair.decode.logged()
    for length in LENGTHS:
        assert _ask(pair, length) == _near(right[length]), length
    bodies = {length: pair.body(_prompt(length), COUNT, return_logprob=True) for length in CROSSING}
    posted = {length: (Posted(pair.prefill, body), Posted(pair.decode, body)) for length, body in bodies.items()}
    assert all(_alike(_told(second.answer()), right[length]) for length, (_, second) in posted.items())


@pytest.mark.parametrize("part", PARTS)
def test_each_part_would_be_missed(part: str, pair: Pair, lost: Path, right: dict[int, Any]) -> None:
    lost.write_text(PARTS[part])
    try:
        assert any(_ask(pair, length) != _near(right[length]) for length in CROSSING)
    finally:
        lost.write_text("")


def test_prefill_with_two_ranks(model: Path, tmp_path: Path, right: dict[int, Any]) -> None:
    options = {"prefill": ["--tp", "2"], "environment": {**NO_CARD, **CORES}}
    with running(Pair(tmp_path, model, CONFIG, common=COMMON, **options)) as pair:
        for length in CROSSING:
            assert _alike(_ask(pair, length), right[length]), length


def test_drafts_are_those_of_one_server(tmp_path: Path, lost: Path) -> None:
    model = FAMILIES["deepseek-v4"](tmp_path / "model")
    say_few_words(model)
    common = [*COMMON, *DRAFT]
    with Alone(tmp_path, model, common, NO_CARD) as alone:
        expected = {n: _drafted(alone.generate(_prompt(n), COUNT)) for n in CROSSING}
    # By the number of accepted drafts, how many steps: without an accepted draft, the test would compare nothing.
    assert any(sum(drafts["spec_correct_drafts_histogram"][1:]) for _, drafts in expected.values()), expected
    environment = {**NO_CARD, LOST: str(lost)}
    with running(Pair(tmp_path, model, CONFIG, common=common, environment=environment)) as pair:
        assert "moves dsv4, swa, c128_state, draft.swa, aux of this" in pair.decode.logged()
        assert {n: _drafted(pair.generate(_prompt(n), COUNT)[1]) for n in CROSSING} == expected
        lost.write_text("draft.swa")
        try:
            worse = {n: _drafted(pair.generate(_prompt(n), COUNT)[1]) for n in CROSSING}
        finally:
            lost.write_text("")
    assert {n: tokens for n, (tokens, _) in worse.items()} == {n: tokens for n, (tokens, _) in expected.items()}
    assert worse != expected
