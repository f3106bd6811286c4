"""Real engines with tiny models of large families: latents, experts, gated delta nets, Mamba1, convolutions, sinks,
attention chunks.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.engines import PREFILL, Engine, Pair, engine_options, prompt_of, transfer, travel
from support.families import FAMILIES
from support.models import regret

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG: dict[str, Any] = {"backend": "tcp", "verify": "digest", "liveness": 30.0}
"""vLLM's ranks spin while they wait for each other. With more of them than cores, a process may be silent for long."""
HALVES = {**CONFIG, "vllm": {"pages": {"CPU_ATTN": "halves"}}}
"""With how the stand-ins fill pages. Windows of gpt-oss then move token by token."""

EXPECTED = {
    "DeepSeek V2": "kv (kv)",
    "DeepSeek V3": "kv (kv)",
    "gpt-oss": "swa (swa)",
    "Qwen3-Next": "mamba",
    "Jamba": "mamba",
    "LFM2": "mamba",
    "Llama 4": "chunked_local",
}
"""A part of what an engine says that it moves."""

SECOND = "Using V2 Model Runner"
"""What vLLM says of its second model runner."""


@pytest.fixture(scope="session")
def families(models: Path) -> Any:
    """The folder of a model, which is made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = FAMILIES[name](models / name.lower().replace(" ", "-"))
        return made[name]

    return folder


def some(pair: Pair, lengths: tuple[int, ...]) -> None:
    """Requests one by one, one that goes on with a prefix, and several at once."""
    for length in lengths:
        pair.check(prompt_of(length, length))
    pair.check([*prompt_of(lengths[-1], lengths[-1]), *prompt_of(2, 60)])
    pair.check_several([prompt_of(7000 + seed, 30 + 11 * seed) for seed in range(6)])
    pair.settled()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.shows("engines: the tokens of one, {family}, over tcp")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_the_tokens_are_those_of_one_engine(family: str, families: Any, tmp_path: Path) -> None:
    config = HALVES if family == "gpt-oss" else CONFIG
    with running(Pair(tmp_path, families(family), config, policy="fail")) as pair:
        for said in (EXPECTED[family], SECOND):
            assert said in pair.prefill.logged()
        some(pair, (1, 7, 33, 64, 100, 333))
        for length in (1, 33, 333):
            prompt = prompt_of(length, length)
            assert regret(families(family), prompt, pair.alone(prompt)) < 1e-3, length
        one, other = prompt_of(5, 100), prompt_of(6, 100)
        with pair.prefill.blind(), pair.decode.blind():
            first = pair.prefill.run("swapped", one, 1, dict(PREFILL))
            assert pair.decode.run("swapped", other, 8, first.params).tokens != pair.alone(other)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("family", ["DeepSeek V3", "Qwen3-Next", "Jamba", "LFM2", "gpt-oss", "Llama 4"])
@pytest.mark.shows("{family}, TP {prefill} to TP {decode}")
def test_another_width(family: str, prefill: int, decode: int, families: Any, tmp_path: Path) -> None:
    own = {"tensor_parallel_size": prefill}, {"tensor_parallel_size": decode}
    config = HALVES if family == "gpt-oss" else CONFIG
    with running(Pair(tmp_path, families(family), config, own=own, policy="fail")) as pair:
        some(pair, (7, 100, 333))


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
@pytest.mark.shows("Mamba2 beside full attention, TP {prefill} to TP {decode}")
def test_another_width_of_a_hybrid_model(prefill: int, decode: int, hybrid: Path, tmp_path: Path) -> None:
    own = {"tensor_parallel_size": prefill}, {"tensor_parallel_size": decode}
    with running(Pair(tmp_path, hybrid, CONFIG, own=own, policy="fail")) as pair:
        some(pair, (7, 100, 333))


@pytest.mark.parametrize("family", ["llama", "hybrid", "DeepSeek V3", "gpt-oss"])
@pytest.mark.shows("moves a running request, TP 2 to TP 1 and TP 1 to TP 2: {family}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_a_request_moves_to_another_width_and_back(
    family: str, request: pytest.FixtureRequest, families: Any, tmp_path: Path
) -> None:
    model = request.getfixturevalue(family) if family in ("llama", "hybrid") else families(family)
    key = tmp_path / "key"
    key.write_text("open sesame, open")
    moves = {"move_key_file": str(key)}
    config = HALVES if family == "gpt-oss" else CONFIG
    both = {"kv_role": "kv_both", "more": {"vllm": {**config.get("vllm", {}), **moves}}}
    own = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 1}
    with running(Pair(tmp_path, model, config, own=own, policy="fail", prefill=both, decode=both)) as pair:
        for length in (7, 100, 333):
            prompt = prompt_of(length, length)
            stops = travel(key.read_text(), [pair.prefill, pair.decode, pair.prefill], prompt, 24)
            assert [token for each in stops for token in each.tokens] == pair.alone(prompt, 24), length
            assert all(each.loaded is not None for each in stops[1:]), length
        pair.settled()


ONE: dict[str, int] = {}
RANKS = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    "own",
    [(STAGES, STAGES), (STAGES, ONE), (ONE, STAGES), (RANKS, STAGES)],
    ids=["PP 2 to PP 2", "PP 2 to one", "one to PP 2", "TP 2 to PP 2"],
)
@pytest.mark.shows("pipeline stages on one side or on both")
def test_pipeline_stages(own: Any, llama: Path, tmp_path: Path) -> None:
    with running(Pair(tmp_path, llama, CONFIG, own=own, policy="fail")) as pair:
        some(pair, (7, 100, 333))


@pytest.mark.parametrize("family", ["llama", "hybrid", "DeepSeek V3", "gpt-oss"])
@pytest.mark.shows("engines: vLLM's first model runner, {family}")
def test_the_first_model_runner(family: str, request: Any, families: Any, tmp_path: Path) -> None:
    """All other forked engines have the second, as on a GPU."""
    model = request.getfixturevalue(family) if family in ("llama", "hybrid") else families(family)
    config = HALVES if family == "gpt-oss" else CONFIG
    with running(Pair(tmp_path, model, config, policy="fail", runner=1, async_scheduling=False)) as pair:
        assert SECOND not in pair.prefill.logged()
        for length in (7, 100):
            prompt = prompt_of(length, length)
            assert pair.hand(prompt, 4)[1].tokens == pair.alone(prompt, 4)
        pair.settled()


ROLES = ("kv_producer", "kv_both", "kv_consumer")
CASES = [
    *itertools.product(ROLES, (False, True), (False,), (4,)),
    *itertools.product(ROLES, (False, True), (True,), (1, 4)),
]
"""A role, ``do_remote_prefill``, ``do_remote_decode``, and how many tokens are asked for."""
NOBODY = {"room": "7", "peer": ["tcp://127.0.0.1:9"]}
"""As prefill's answer, for a server that receives nothing. A real one would be held for it until its deadline."""


def received(engine: Engine) -> int:
    """How many requests have got their state from another engine."""
    count: int = engine.ask()["rooms"].get("decode", {}).get("succeeded", 0)
    return count


@pytest.mark.parametrize("family", [pytest.param("windowed", marks=pytest.mark.smoke), "llama", "hybrid", *FAMILIES])
@pytest.mark.shows(
    "every pair of flags on every role, and chains of three engines: the tokens of one without a connector"
)
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_every_pair_of_flags_on_every_role(family: str, request: Any, families: Any, tmp_path: Path) -> None:
    """Another engine prefills for the one that is looked at, and a third one decodes what that one sends on."""
    model = families(family) if family in FAMILIES else request.getfixturevalue(family)
    config = HALVES if family == "gpt-oss" else CONFIG
    options = {role: engine_options(model, kv_transfer_config=transfer(config, "fail", kv_role=role)) for role in ROLES}
    with ExitStack() as stack:
        engines = {
            name: Engine(name, tmp_path, each) for name, each in {"alone": engine_options(model), **options}.items()
        }
        for engine in engines.values():
            stack.callback(engine.kill)
        for engine in engines.values():
            engine.wait_ready()
        whole = family in ("llama", "DeepSeek V2", "DeepSeek V3")
        for number, case in enumerate(CASES):
            role, receives, sends, count = case
            first, server = engines["kv_both" if role == "kv_producer" else "kv_producer"], engines[role]
            last = engines["kv_both" if role == "kv_consumer" else "kv_consumer"]
            before, behind = received(server), received(last)
            name, prompt = f"request{number}", prompt_of(8000 + number, 40 + 23 * number % 90)
            alone = engines["alone"].run(name, prompt, 4).tokens
            given = NOBODY if role == "kv_producer" else {}
            if receives and role != "kv_producer":
                given = first.run(f"{name} first", prompt, 1, dict(PREFILL)).params or {}
            made = server.run(name, prompt, count, {**given, "do_remote_prefill": receives, "do_remote_decode": sends})
            if sends:
                assert last.run(f"{name} last", prompt, 4, made.params).tokens == alone, case
            receives, sends = receives and role != "kv_producer", sends and role != "kv_consumer"
            sends = sends and (whole or (count == 1 and not receives))
            assert (received(server) - before, received(last) - behind) == (receives, sends), case
            if whole or not sends:  # otherwise a router drops it, because it is that of a shorter prompt
                assert made.tokens == alone[:count], case
        for engine in engines.values():
            assert engine.settle() == engine.free, engine.name
