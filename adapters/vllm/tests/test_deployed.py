"""The models that public recipes deploy, as whole engines: tiny, with random weights, and kernels in plain torch.

All of decode's cache has NaN before each request, as in every engine that is forked here; see `support/poison.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.deployed import DEPLOYED
from support.engines import PREFILL, Pair, prompt_of
from support.models import apart, regret

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG: dict[str, Any] = {
    "backend": "tcp",
    "verify": "digest",
    "liveness": 60.0,
    "vllm": {"pages": {"CPU_ATTN": "halves"}},
}
"""With how the stand-ins fill pages of dense layers."""


@pytest.fixture(scope="session")
def deployed(models: Path) -> Callable[[str], Path]:
    """The folder of a model, which is made once."""
    made: dict[Any, Path] = {}

    def folder(name: str) -> Path:
        model = DEPLOYED[name]
        if model.make not in made:
            made[model.make] = model.make(models / model.make.__name__)
            if model.round is not None:
                model.round()
        return made[model.make]

    return folder


def pair_of(name: str, deployed: Any, folder: Path, *widths: int, **more: Any) -> Pair:
    own: Any = tuple({"tensor_parallel_size": width} for width in widths or (1, 1))
    return Pair(folder, deployed(name), CONFIG, own=own, policy="fail", **DEPLOYED[name].options, **more)


@pytest.mark.smoke
@pytest.mark.parametrize("name", [name for name, model in DEPLOYED.items() if model.round is not None])
def test_a_prompt_of_more_than_a_block(name: str, deployed: Any, tmp_path: Path) -> None:
    with running(pair_of(name, deployed, tmp_path)) as pair:
        pair.check(prompt_of(131, 131), count=4, within=DEPLOYED[name].within)
        assert pair.moved()[0] == 1
        pair.settled()


@pytest.mark.parametrize("name", DEPLOYED)
@pytest.mark.shows("engines: the tokens and the logprobs of one, and of transformers, {name}, over tcp")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_tokens_and_logprobs_are_those_of_one_engine_and_of_transformers(
    name: str, deployed: Any, tmp_path: Path
) -> None:
    model = DEPLOYED[name]
    with running(pair_of(name, deployed, tmp_path)) as pair:
        for said in model.says:
            assert said in pair.prefill.logged()
        for length in model.lengths:
            prompt = prompt_of(length, length)
            made = pair.check(prompt, within=model.within)
            if model.round is not None:
                assert regret(deployed(name), prompt, made.tokens) < model.within, length
                assert apart(deployed(name), prompt, made.tokens, made.logprobs) < model.within, length
        before = pair.moved()[1]
        pair.check(prompt_of(3, length + 60), within=model.within)
        whole, before = pair.moved()[1] - before, pair.moved()[1]
        pair.check([*prompt, *prompt_of(2, 60)], within=model.within)
        assert pair.moved()[1] - before < whole, "decode holds a part of it"
        pair.check_several([prompt_of(7000 + seed, 30 + 37 * seed) for seed in range(4)])
        one, other = prompt_of(5, 290), prompt_of(6, 290)
        with pair.prefill.blind(), pair.decode.blind():
            first = pair.prefill.run("swapped", one, 1, dict(PREFILL))
            assert pair.decode.run("swapped", other, 8, first.params).tokens != pair.alone(other)
        params = pair.prefill.run("gone on decode", one, 1, dict(PREFILL)).params
        pair.decode.add("gone on decode", one, 8, params)
        pair.decode.abort("gone on decode")
        pair.prefill.add("gone on prefill", prompt_of(8, 900), 1, dict(PREFILL))
        pair.prefill.abort("gone on prefill")
        pair.settled()


@pytest.mark.parametrize("widths", [(2, 1), (1, 2)], ids=["TP 2 to TP 1", "TP 1 to TP 2"])
@pytest.mark.parametrize("name", DEPLOYED)
@pytest.mark.shows("{name}, TP 2 to TP 1 and TP 1 to TP 2")
def test_another_width(name: str, widths: tuple[int, int], deployed: Any, tmp_path: Path) -> None:
    with running(pair_of(name, deployed, tmp_path, *widths)) as pair:
        for length in DEPLOYED[name].lengths[1::3]:
            pair.check(prompt_of(length, length), within=DEPLOYED[name].within)
        pair.check_several([prompt_of(7000 + seed, 30 + 37 * seed) for seed in range(4)])
        pair.settled()


@pytest.mark.skipif("Kimi-Linear" not in DEPLOYED, reason="its kernels are not in this release")
@pytest.mark.parametrize("sizes", [(128, 256), (256, 128)], ids=str)
@pytest.mark.shows("blocks of two sizes beside recurrent layers, and NaN behind the last token that comes")
def test_what_is_behind_the_last_token_is_not_read(sizes: tuple[int, int], deployed: Any, tmp_path: Path) -> None:
    """The other models have blocks of one size alone."""
    own: Any = tuple({"block_size": size} for size in sizes)
    model = DEPLOYED["Kimi-Linear"]
    with running(Pair(tmp_path, deployed("Kimi-Linear"), CONFIG, own=own, policy="fail", **model.options)) as pair:
        assert pair.prefill.free != pair.decode.free
        for length in (7, 127, 129, 300):
            pair.check(prompt_of(length, length))
        pair.settled()
