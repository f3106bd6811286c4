"""Real engines whose prefill sends the layers of a prompt while it computes them: the router asks both at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import free_port, running
from support.engines import PREFILL, Pair, prompt_of
from support.families import make_eagle
from support.models import make_hybrid, make_llama, make_windowed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

WHOLE: dict[str, Any] = {"max_num_batched_tokens": 1024}
"""Room for a whole prompt in a step. Otherwise there are 64 tokens in one."""

MODELS = {"full": make_llama, "windows": make_windowed, "recurrent": make_hybrid}


def add(pair: Pair, name: str, prompt: list[int], *, late: bool = False) -> None:
    """Both engines get a request; decode first, unless it is late."""
    asks = {"do_remote_prefill": True, "remote_engine_id": "prefill-0", "transfer_id": name}
    order = [(pair.decode, 8, asks), (pair.prefill, 1, {**PREFILL, "transfer_id": name})]
    for engine, count, params in reversed(order) if late else order:
        engine.add(name, prompt, count, params)
        engine.ask()  # it has the request


def tokens_of(pair: Pair, name: str, prompt: list[int]) -> list[int]:
    add(pair, name, prompt)
    pair.prefill.result(name)
    answer: list[int] = pair.decode.result(name).tokens
    return answer


@contextmanager
def at_once(folder: Path, model: Path, connector: str = "", **common: Any) -> Iterator[Pair]:
    listen = f"tcp://127.0.0.1:{free_port()}"
    more = {"kv_connector": connector, "kv_connector_module_path": "support.late_connector"} if connector else {}
    prefill = {"engine_id": "prefill-0", "more": {"listen": listen}, **more}
    decode = {"more": {"peers": {"prefill-0": [listen]}}}
    config = {"backend": "tcp", "verify": "digest"}
    with running(Pair(folder, model, config, prefill=prefill, decode=decode, **common)) as pair:
        yield pair


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("full", WHOLE), ("full", {}), ("windows", WHOLE), ("windows", {}), ("recurrent", {})],
    ids=["full, one step", "full, chunks", "windows, one step", "windows, chunks", "recurrent, chunks"],
)
@pytest.mark.shows("engines: layers that move while the forward pass runs")
def test_the_tokens_are_those_of_one_engine(tmp_path: Path, kind: str, options: dict[str, Any], runner: int) -> None:
    model = MODELS[kind](tmp_path / "model")
    with at_once(tmp_path, model, policy="fail", runner=runner, **options) as pair:
        lengths = (2, 33, 100, 333, 700)
        for length in lengths:
            prompt = prompt_of(length, length)
            assert tokens_of(pair, f"n{length}", prompt) == pair.alone(prompt), length
        assert pair.moved()[0] == len(lengths)
        assert max(pair.prefill.ask()["chunks"]) > (1 if options else 11), "nothing was sent before its step had ended"
        pair.settled()


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.shows("aborts in every state")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_clients_that_leave_while_layers_move(llama: Path, tmp_path: Path, runner: int) -> None:
    """On either side, at any moment; some decodes ask late, and some prompts begin alike."""
    rng = random.Random(runner)
    with at_once(tmp_path, llama, runner=runner, **WHOLE) as pair:
        alike = prompt_of(999, 300)
        prompts = {}
        for number in range(32):
            own = prompt_of(number, rng.choice([5, 33, 200, 600]))
            prompts[f"n{number}"] = [*alike[: rng.choice([64, 100, 300])], *own] if number % 4 == 3 else own
        fates = {name: rng.choice(["", "", "late", "prefill", "decode"]) for name in prompts}
        for name, prompt in prompts.items():
            add(pair, name, prompt, late=fates[name] == "late")
            if fates[name] in ("prefill", "decode"):
                getattr(pair, fates[name]).abort(name)
        for name, prompt in prompts.items():
            if fates[name] != "decode":
                assert pair.decode.result(name).tokens == pair.alone(prompt), (name, fates[name])
        pair.settled()


@pytest.mark.shows("engines: layers that move while the forward pass runs, with drafts")
def test_drafts_follow_at_the_end(llama: Path, tmp_path: Path) -> None:
    given = {"method": "eagle", "model": str(make_eagle(llama, tmp_path / "eagle")), "num_speculative_tokens": 2}
    with at_once(tmp_path, llama, policy="fail", speculative_config=given, **WHOLE) as pair:
        for length in (7, 100, 700):
            prompt = prompt_of(length, length)
            assert tokens_of(pair, f"n{length}", prompt) == pair.alone(prompt), length
        assert max(pair.prefill.ask()["chunks"]) > 2
        assert pair.moved()[0] == 3
        pair.settled()


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("connector", ["LateConnector", "ForgetfulConnector"])
@pytest.mark.shows("engines: layers that move while the device is behind")
def test_layers_of_a_device_that_is_behind_wait_for_their_events(
    llama: Path, tmp_path: Path, connector: str, runner: int
) -> None:
    """Without events, decode gets what was in that memory before."""
    with at_once(tmp_path, llama, connector, policy="fail", runner=runner, **WHOLE) as pair:
        prompts = {f"n{length}": prompt_of(length, length) for length in (100, 200, 333, 500, 700)}
        found = {name: tokens_of(pair, name, prompt) for name, prompt in prompts.items()}
        right = {name: pair.alone(prompt) for name, prompt in prompts.items()}
        assert (found == right) is (connector == "LateConnector")
        if found == right:
            assert pair.moved()[0] == len(prompts)
        pair.settled()
