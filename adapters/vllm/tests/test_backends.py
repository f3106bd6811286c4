"""Real engines over each native backend, and engines that prefill and decode at once and know each other by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engine_processes import free_port, running
from support.engines import PREFILL, Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


@pytest.mark.smoke
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.shows("engines: the tokens of one, dense model, over {backend}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_the_tokens_are_those_of_one_engine(backend: str, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip(f"statelink_{backend}")
    with running(Pair(tmp_path, llama, {"backend": backend, "verify": "digest"})) as pair:
        for number, length in enumerate((7, 100)):
            prompt = prompt_of(length, length)
            _, second = pair.hand(prompt)
            assert second.tokens == pair.alone(prompt)
            assert pair.moved()[0] == number + 1
        pair.settled()
        for engine in (pair.prefill, pair.decode):
            assert f"Statelink backend '{backend}' moves" in engine.logged()


@pytest.fixture(scope="module")
def equals(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines with both roles, which find each other by configured names."""
    ports = [free_port(), free_port()]
    peers = {f"engine-{number}": [f"tcp://127.0.0.1:{port}"] for number, port in enumerate(ports)}
    sides = [
        {"kv_role": "kv_both", "engine_id": name, "more": {"listen": address}} for name, (address,) in peers.items()
    ]
    config = {"backend": "tcp", "verify": "digest", "peers": peers}
    folder = tmp_path_factory.mktemp("equals")
    with running(Pair(folder, llama, config, prefill=sides[0], decode=sides[1])) as pair:
        yield pair


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.shows("one link with both roles")
def test_engines_with_both_roles_hand_requests_both_ways(equals: Pair, number: int) -> None:
    source, target = (equals.prefill, equals.decode)[:: -1 if number else 1]
    prompt = prompt_of(number, 100)
    first = source.run(f"turn{number}", prompt, 1, dict(PREFILL))
    assert target.run(f"turn{number}", prompt, 8, first.params).tokens == source.run(f"one{number}", prompt).tokens
    assert target.ask()["rooms"]["decode"] == {"succeeded": 1}
    equals.settled()


@pytest.mark.shows("a router that sends to both at once")
def test_a_router_may_send_to_both_at_once(equals: Pair) -> None:
    prompt = prompt_of(7, 300)
    before = equals.moved()[0]
    said = {"transfer_id": "xfer-7", "do_remote_prefill": True, "remote_engine_id": "engine-0"}
    equals.decode.add("both", prompt, 8, said)
    equals.prefill.add("both", prompt, 1, {**PREFILL, "transfer_id": "xfer-7"})
    assert equals.decode.result("both").tokens == equals.alone(prompt)
    assert equals.moved()[0] == before + 1
    equals.settled()


@pytest.mark.shows("parts of a prompt that are sent while it is computed")
def test_most_of_a_long_prompt_moves_while_the_rest_is_computed(equals: Pair) -> None:
    """Prefill takes 64 tokens at a time, and a block has 32."""
    prompt = prompt_of(9, 960)
    before = equals.moved()[0]
    said = {"transfer_id": "xfer-9", "do_remote_prefill": True, "remote_engine_id": "engine-0"}
    equals.decode.add("long", prompt, 8, said)
    equals.decode.ask()
    equals.prefill.add("long", prompt, 1, {**PREFILL, "transfer_id": "xfer-9"})
    assert equals.decode.result("long").tokens == equals.alone(prompt)
    assert equals.moved()[0] == before + 1, "decode has computed it"
    equals.settled()
    chunks = equals.prefill.ask()["chunks"][-1]
    assert chunks > 5, "the last one is pushed when the prompt is computed, and the others before"


def test_prefill_tells_a_decode_that_waits_of_an_abort(equals: Pair) -> None:
    prompt = prompt_of(8, 900)
    said = {"transfer_id": "xfer-8", "do_remote_prefill": True, "remote_engine_id": "engine-0"}
    equals.decode.add("told", prompt, 8, said)
    equals.prefill.add("told", prompt, 1, {**PREFILL, "transfer_id": "xfer-8"})
    equals.prefill.abort("told")
    assert equals.decode.result("told").tokens == equals.alone(prompt)
    assert "prefill did not compute the prompt: FINISHED_ABORTED" in equals.decode.logged()
    equals.settled()
