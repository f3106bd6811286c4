"""The stand-ins for vLLM's kernels: one engine gives the tokens of the model's own code in `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engines import Engine, engine_options, prompt_of
from support.models import make_hybrid, make_llama, make_windowed, regret

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.servers

WINDOW = 64


# vLLM normalises what leaves a Mamba2 layer by group of heads, and `transformers` over all heads: with one group, both
# agree. Its window of Cohere2 has one token more than that of `transformers`: the token itself does not count.
@pytest.mark.parametrize(
    ("make", "own", "changed"),
    [
        pytest.param(make_llama, {}, {}, id="full attention"),
        pytest.param(make_windowed, {"window": WINDOW}, {"sliding_window": WINDOW + 1}, id="windows"),
        pytest.param(make_hybrid, {"groups": 1}, {}, id="Mamba2"),
    ],
)
def test_the_tokens_are_those_of_transformers(
    make: Callable[..., Path], own: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    model = make(tmp_path / "model", **own)
    engine = Engine("one", tmp_path, engine_options(model)).wait_ready()
    try:
        for length in (1, 33, 64, 100, 200, 333):
            prompt = prompt_of(length, length)
            assert regret(model, prompt, engine.run(f"of {length}", prompt, 12).tokens, **changed) < 1e-3, length
    finally:
        engine.kill()
