"""Real engines that draft tokens: n-grams, EAGLE, MTP and a draft model.

The drafts of each step are those of one engine. With random weights, hardly any is taken.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.deployed import DEPLOYED, DRAFTS
from support.engines import PREFILL, Engine, Pair, engine_options, prompt_of, travel
from support.families import FAMILIES, add_mtp, make_eagle
from support.models import make_llama

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG: dict[str, Any] = {"backend": "tcp", "verify": "digest"}
COUNT = 24
LENGTHS = (7, 64, 100, 333)
MOST_AT_ONCE = 3
"""Most tokens that are drafted in a step."""
FIRST = {"runner": 1, "async_scheduling": False}
"""Triton's interpreter cannot run the second runner's kernel of n-grams, and the first does not draft them ahead."""


def drafting(kind: str, models: Path, llama: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and what an engine needs to draft for it; see `Pair`."""
    if kind == "ngram":
        given = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
        return llama, {"speculative_config": given, **FIRST}
    if kind == "EAGLE":
        head = models / "eagle"
        made = head if head.exists() else make_eagle(llama, head)
        given = {"method": "eagle", "model": str(made), "num_speculative_tokens": 2}
        return llama, {"speculative_config": given}
    if kind == "draft model":
        folder = models / "draft"
        made = folder if folder.exists() else make_llama(folder)
        given = {"method": "draft_model", "model": str(made), "num_speculative_tokens": 2}
        return llama, {"speculative_config": given}
    if kind in DRAFTS:
        drafts = DRAFTS[kind]
        of, folder = DEPLOYED[drafts.of], models / f"to draft for {drafts.of}"
        plain = folder if folder.exists() else of.make(folder)
        made = drafts.make(plain, models / kind)
        given = {**drafts.given, **({"model": str(made)} if drafts.beside else {})}
        return plain if drafts.beside else made, {"speculative_config": given, **of.options}
    folder = models / "mtp"
    if not folder.exists():
        add_mtp(FAMILIES["DeepSeek V3"](models / "without-mtp"), folder)
    # Without room for a whole prompt, vLLM never schedules a longer one. Ahead of the model, the host only knows how
    # long a request may be, and vLLM's latent attention on a CPU takes drafts as a prompt of exactly that length.
    return folder, {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        "max_num_batched_tokens": 1024,
        "async_scheduling": False,
    }


def accepted(
    engine: Engine, name: str, prompt: list[int], params: dict[str, Any] | None
) -> tuple[list[int], list[int], list[list[int]]]:
    """The tokens of a request, how many drafts were made and taken for it, and the drafts of each step."""
    before = engine.ask()["drafts"]
    tokens = engine.run(name, prompt, COUNT, params).tokens
    after = engine.ask()
    return tokens, [b - a for a, b in zip(before, after["drafts"], strict=True)], after["drafted"]


def repeating(seed: int, length: int) -> list[int]:
    """A prompt that n-grams of it go on."""
    part = prompt_of(seed, 12)
    made: list[int] = (part * (1 + length // len(part)))[:length]
    return made


@pytest.mark.parametrize("kind", ["ngram", "EAGLE", "MTP", "draft model", *DRAFTS])
@pytest.mark.shows("engines: the tokens and the drafts of one, {kind}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_drafts_are_made_and_taken_as_on_one_engine(kind: str, models: Path, llama: Path, tmp_path: Path) -> None:
    model, options = drafting(kind, models, llama)
    answers: list[list[int]] = []
    with running(Pair(tmp_path, model, CONFIG, policy="fail", **options)) as pair:
        for said in DRAFTS[kind].says if kind in DRAFTS else ():
            assert said in pair.prefill.logged()
        made = 0
        for length in LENGTHS:
            prompt = repeating(length, length)
            alone, (drafted, taken), drafts = accepted(pair.prefill, f"alone{length}", prompt, None)
            first = pair.prefill.run(f"one{length}", prompt, 1, dict(PREFILL))
            moved = pair.moved()[0]
            handed, (drafted_there, taken_there), there = accepted(pair.decode, f"one{length}", prompt, first.params)
            assert (handed, taken_there) == (alone, taken), length
            # A prompt's chunks have drafts, too, on the engine that computes them.
            assert there == drafts[len(drafts) - len(there) :], length
            assert there or options.get("runner") == 1
            # Decode drafts before the first token, too, which prefill has sampled without a draft.
            assert 0 <= drafted_there - drafted <= MOST_AT_ONCE
            assert pair.moved()[0] == moved + 1
            answers.append(alone)
            made += drafted
        assert made, "nothing was drafted"
        pair.settled()
    options.pop("speculative_config")
    runner = options.pop("runner", 2)
    plain = Engine("plain", tmp_path, engine_options(model, **options), runner=runner)
    try:
        plain.wait_ready()
        for length, tokens in zip(LENGTHS, answers, strict=True):
            assert plain.run(f"plain{length}", repeating(length, length), COUNT).tokens == tokens
    finally:
        plain.kill()


@pytest.mark.shows("engines: prefill drafts fewer tokens than decode, as in recipes of MiniMax-M3")
def test_prefill_may_draft_fewer_tokens(models: Path, llama: Path, tmp_path: Path) -> None:
    model, options = drafting("EAGLE3 with MiniMax-M3", models, llama)
    given = options.pop("speculative_config")
    own: Any = tuple({"speculative_config": {**given, "num_speculative_tokens": count}} for count in (1, 3))
    with running(Pair(tmp_path, model, CONFIG, policy="fail", own=own, **options)) as pair:
        for length in (7, 333):
            prompt = repeating(length, length)
            alone, _, drafts = accepted(pair.prefill, f"alone{length}", prompt, None)
            first = pair.prefill.run(f"one{length}", prompt, 1, dict(PREFILL))
            handed, _, there = accepted(pair.decode, f"one{length}", prompt, first.params)
            assert handed == alone, length
            assert {len(each) for each in there} == {3}
            assert [each[:1] for each in there] == drafts[len(drafts) - len(there) :], length
        assert pair.moved()[0] == 2
        pair.settled()


WITHOUT_STATE = {"n-grams, recurrent layers": "may be behind tokens that were not taken"}
"""Drafts with which requests move without their state, and a part of why."""


@pytest.mark.parametrize("kind", ["ngram", "EAGLE", "MTP", "draft model", "EAGLE3 with MiniMax-M3", *WITHOUT_STATE])
@pytest.mark.shows("moves a running request to another engine, which drafts as it did: {kind}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_a_request_that_moves_has_the_tokens_of_one_that_stayed(
    kind: str, models: Path, llama: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model, options = drafting("ngram" if kind.startswith("n-grams") else kind, models, llama)
    if kind == "n-grams, recurrent layers":
        model = request.getfixturevalue("hybrid")
        options["enable_prefix_caching"] = False  # the first runner copies states for it with a kernel of Triton
    key = tmp_path / "key"
    key.write_text("open sesame, open")
    both = {"kv_role": "kv_both", "more": {"vllm": {"move_key_file": str(key)}}}
    with running(Pair(tmp_path, model, CONFIG, prefill=both, decode=both, policy="fail", **options)) as pair:
        for length in LENGTHS:
            prompt = repeating(length, length)
            alone = pair.alone(prompt, 2 * COUNT)
            stops = travel(key.read_text(), [pair.prefill, pair.decode, pair.prefill], prompt, 2 * COUNT, 5)
            assert [token for each in stops for token in each.tokens] == alone, length
            here = len(prompt)
            for before, after in itertools.pairwise(stops):
                here += len(before.tokens)
                why = WITHOUT_STATE.get(kind)
                assert before.params is not None
                if why is None:
                    # One token more, if drafts behind it were taken when it moved.
                    assert before.params["tokens"] in (here - 1, here), length
                    assert after.loaded is not None, length
                else:
                    assert (after.loaded, why in before.params["refused"]) == (None, True), length
        pair.settled()


@pytest.mark.shows("engines: n-grams on decode alone")
def test_ngrams_need_no_state(llama: Path, models: Path, tmp_path: Path) -> None:
    _, options = drafting("ngram", models, llama)
    runner = options.pop("runner")
    with running(Pair(tmp_path, llama, CONFIG, policy="fail", own=({}, options), runner=runner)) as pair:
        for length in (7, 100, 333):
            prompt = repeating(length, length)
            assert pair.hand(prompt, COUNT)[1].tokens == pair.alone(prompt, COUNT)
        pair.settled()


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
@pytest.mark.shows("a draft model on one side alone is refused by name when the sides meet")
def test_a_draft_model_on_one_side_is_refused(side: int, models: Path, llama: Path, tmp_path: Path) -> None:
    _, options = drafting("EAGLE", models, llama)
    own: Any = (options, {}) if side == 0 else ({}, options)
    with running(Pair(tmp_path, llama, CONFIG, own=own)) as pair:
        prompt = prompt_of(3, 100)
        _, second = pair.hand(prompt)
        assert second.tokens == pair.alone(prompt), "decode computes the prompt"
        assert pair.moved()[0] == 0
        assert "component draft.kv (type kv)" in pair.decode.logged()
        pair.settled()
