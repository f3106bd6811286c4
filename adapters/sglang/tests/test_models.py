"""Real models of SGLang's, one family after the other: two servers each, over tcp, and the tokens of transformers.

Their kernels are stand-ins (`support/kernels`). Everything else is SGLang's: pools, schedulers, layers, plans of pages.
The pools are poisoned (`support/poison.py`), and what decode names for each request is poisoned again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import transformers
from engine_processes import running
from support.families import FAMILIES
from support.models import generate, prompt_of
from support.newest import OLDER
from support.poison import POISONED
from support.servers import Alone, Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest"}
PAGES = ["--page-size", "16", "--chunked-prefill-size", "32"]
CONVOLUTIONS = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""By default SGLang keeps inputs of convolutions in bfloat16, and transformers does not."""
PLAIN_ROUTER = {"SGLANG_OPT_USE_BF16_ROUTER_GEMM": "0"}
"""By default MiniMax's router multiplies by a kernel of a card."""
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
CACHED = ["--disaggregation-decode-enable-radix-cache"]
MAY_BE_OLDER = OLDER or not {"STATELINK_PREFILL_PYTHON", "STATELINK_DECODE_PYTHON"}.isdisjoint(os.environ)
"""Whether a server may be of an older release.

SGLang 0.5.21 keeps prefixes of recurrent models on graphics cards alone. Neither 0.5.21 nor 0.5.22 scales the weights
of experts on a CPU, as MiniMax-M3 has them.
"""

OLD_TRANSFORMERS = int(transformers.__version__.split(".")[1]) < 19
LACKS = {
    "kimi": "has no Kimi-Linear",
    "nemotron": "gives Nemotron-H's embeddings another name than checkpoints do",
}
"""Models that no checkpoint can be made of with the transformers of SGLang 0.5.21."""


class Case(NamedTuple):
    """A pair of servers.

    Attributes:
        family: The model, one of `FAMILIES`.
        moved: What decode's log says is moved.
        common: Options of both servers.
        prefill: Options of prefill.
        decode: Options of decode.
        environment: Variables of both.
        cached: Tokens that decode holds already of 130, of which it has had 100; 0 if it keeps no prefixes.
        alone: Whether one server without disaggregation says what is right.
    """

    family: str
    moved: str
    common: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    environment: dict[str, str] = {}  # noqa: RUF012
    cached: int = 0
    alone: bool = False


TWO = ("--tp", "2")
SPARSE = "kv, minimax_index_k, minimax_dense_kv, aux"
CASES = {
    "deepseek": Case("deepseek", "kv, aux", decode=tuple(CACHED), cached=96),
    "qwen-next": Case("qwen-next", "kv, mamba, aux", environment=CONVOLUTIONS),
    "falcon": Case("falcon", "kv, mamba, aux", environment=CONVOLUTIONS),
    "nemotron": Case("nemotron", "kv, mamba, aux", environment=CONVOLUTIONS),
    "kimi": Case("kimi", "kv, mamba, aux", environment=CONVOLUTIONS),
    "sparse": Case("sparse", "kv, dsa, aux", ("--page-size", "64", "--chunked-prefill-size", "64"), alone=True),
    "sparse-cached": Case(
        "sparse",
        "kv, dsa, aux",
        ("--page-size", "64", "--chunked-prefill-size", "64"),
        decode=tuple(CACHED),
        cached=64,
        alone=True,
    ),
    "minimax": Case("minimax", SPARSE, decode=tuple(CACHED), environment=PLAIN_ROUTER, cached=96),
    # State moves token by token, so the rest of decode's last page stays poisoned.
    "deepseek-pages": Case("deepseek", "kv, aux", decode=("--page-size", "64")),
    "minimax-pages": Case("minimax", SPARSE, decode=("--page-size", "64"), environment=PLAIN_ROUTER),
    "deepseek-2-1": Case("deepseek", "kv, aux", prefill=TWO, environment=CORES),
    "deepseek-1-2": Case("deepseek", "kv, aux", decode=TWO, environment=CORES),
    "qwen-next-2-1": Case("qwen-next", "kv, mamba, aux", prefill=TWO, environment={**CORES, **CONVOLUTIONS}),
    "qwen-next-1-2": Case("qwen-next", "kv, mamba, aux", decode=TWO, environment={**CORES, **CONVOLUTIONS}),
    "minimax-2-1": Case("minimax", SPARSE, prefill=TWO, environment={**CORES, **PLAIN_ROUTER}),
    "minimax-1-2": Case("minimax", SPARSE, decode=TWO, environment={**CORES, **PLAIN_ROUTER}),
    "kimi-2-1": Case("kimi", "kv, mamba, aux", prefill=TWO, environment={**CORES, **CONVOLUTIONS}),
    "kimi-1-2": Case("kimi", "kv, mamba, aux", decode=TWO, environment={**CORES, **CONVOLUTIONS}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in made:
            made[family] = FAMILIES[family](tmp_path_factory.mktemp("models") / family)
        return made[family]

    return find


LONGER = [*prompt_of(100, 100), *prompt_of(2, 30)]
PROMPTS = [*(prompt_of(length, length) for length in (5, 40, 100)), LONGER, LONGER]
TOGETHER = [prompt_of(500 + seed, 20 + 7 * seed) for seed in range(10)]


def _right(case: Case, model: Path, folder: Path) -> Iterator[list[int]]:
    """The tokens of `PROMPTS` and `TOGETHER`, as somebody says who has all of the state."""
    if not case.alone:
        yield from (generate(model, prompt, 8) for prompt in [*PROMPTS, *TOGETHER])
        return
    with Alone(folder, model, [*PAGES, *case.common]) as server:
        yield from (server.generate(prompt, 8).tokens for prompt in [*PROMPTS, *TOGETHER])


def _marked(name: str) -> Any:
    """A case; those with one rank on each side are also run with two releases of SGLang."""
    alone = name.endswith(("-1", "-2"))
    return pytest.param(name, marks=() if alone else pytest.mark.two_releases)


@pytest.mark.parametrize("name", map(_marked, CASES))
def test_the_tokens_are_right(name: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    case = CASES[name]
    if OLD_TRANSFORMERS and case.family in LACKS:
        pytest.skip(f"transformers {transformers.__version__} {LACKS[case.family]}")
    if MAY_BE_OLDER and case.family == "minimax":
        pytest.skip("the stand-ins for its kernels are for SGLang's newest release")
    if MAY_BE_OLDER and "mamba" in case.moved:
        case = case._replace(common=(*case.common, "--disable-radix-cache"))
    model = models(case.family)
    right = list(_right(case, model, tmp_path))
    common, environment = [*PAGES, *case.common], case.environment
    given = {"prefill": list(case.prefill), "decode": list(case.decode), "environment": environment}
    with running(Pair(tmp_path, model, CONFIG, common=common, **given)) as pair:
        for server in (pair.prefill, pair.decode):
            assert f"Statelink backend 'tcp' moves {case.moved} of this" in server.logged()
            assert POISONED in server.logged()
        for prompt, expected in zip(PROMPTS, right, strict=False):
            first, second = pair.generate(prompt)
            assert (first.tokens, second.tokens) == (expected[:1], expected), len(prompt)
            if prompt == LONGER and case.cached:
                assert second.body["meta_info"]["cached_tokens"] >= case.cached
        bodies = [pair.body(prompt) for prompt in TOGETHER]
        posted = [(Posted(pair.prefill, body), Posted(pair.decode, body)) for body in bodies]
        assert [second.answer().tokens for _, second in posted] == right[len(PROMPTS) :]
