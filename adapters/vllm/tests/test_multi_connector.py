"""``MultiConnector``: Statelink beside another connector of vLLM, in two real servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import free_port, running
from support.engines import PREFILL, prompt_of
from support.failing_connector import FAILS
from support.offloading import plugin_folder
from support.servers import PREFILL_NAME, Server, ServerPair

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26, "block_size": 32},
}
QUICK = {"backend": "tcp", "heartbeat": 0.5, "liveness": 3.0, "deadline": 20.0, "verify": "digest"}


def several(config: dict[str, Any], *others: dict[str, Any], first: bool) -> dict[str, Any]:
    """The configuration of several connectors; with ``first``, Statelink is asked before the others."""
    children = [config, *others] if first else [*others, config]
    own = {key: config[key] for key in ("kv_role", "kv_load_failure_policy", "engine_id")}
    for child in children:
        child.pop("engine_id", None)
    return {**own, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}


@contextlib.contextmanager
def servers(folder: Path, model: Path, *, first: bool, named: bool = True) -> Iterator[ServerPair]:
    """A pair with offloading. ``named``: whether the configuration names the module of Statelink's connector."""

    def around(name: str, config: dict[str, Any]) -> dict[str, Any]:
        given = dict(config)
        if not named:
            del given["kv_connector_module_path"]
        return several(given, dict(OFFLOADING), first=first)

    environment = {**plugin_folder(folder / "plugin"), "VLLM_SERVER_DEV_MODE": "1"}
    # Its processes load the stand-in as a plugin.
    pair = ServerPair(folder, model, dict(QUICK), around=around, environment=environment, ordinary=True)
    with running(pair):
        yield pair


@pytest.fixture(scope="module", params=[True, False], ids=["Statelink first", "offloading first"])
def first(request: pytest.FixtureRequest) -> bool:
    made: bool = request.param
    return made


@pytest.fixture(scope="module")
def pair(first: bool, tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[ServerPair]:
    with servers(tmp_path_factory.mktemp("multi"), llama, first=first, named=first) as made:
        yield made


def forget(server: Server) -> None:
    """Empty the prefix cache in the server's own blocks, and not what was offloaded."""
    assert server.ask("/reset_prefix_cache", {}).status == 200


@pytest.mark.shows("two servers: MultiConnector with offloading, in both orders")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_the_tokens_are_those_of_one_server(pair: ServerPair) -> None:
    prompts = [prompt_of(length, length) for length in (1, 7, 64, 100, 333)]
    expected = [pair.prefill.complete(prompt, 8).tokens for prompt in prompts]
    for _ in range(2):
        assert [pair.route(prompt).tokens for prompt in prompts] == expected
    many = [prompt_of(3000 + seed, 20 + seed % 61) for seed in range(16)]
    with ThreadPoolExecutor(len(many)) as threads:
        answers = [each.tokens for each in threads.map(lambda prompt: pair.route(prompt, 4), many)]
    assert answers == [pair.prefill.complete(prompt, 4).tokens for prompt in many]
    for server in (pair.prefill, pair.decode):
        assert "could not be" not in server.logged()
        server.wait_counted("vllm:statelink_transfer_bytes_count", 1)
    pair.settled()


@pytest.mark.shows("two servers: MultiConnector, prefix hits from either connector")
def test_a_prefix_comes_from_whoever_has_it(pair: ServerPair, first: bool) -> None:
    """The first connector that has more than the server's own cache loads it. Statelink then declines the rest."""
    prompt = prompt_of(77, 320)
    expected = pair.prefill.complete(prompt, 8).tokens
    assert pair.route(prompt).tokens == expected  # decode offloads the prompt's blocks
    pair.settled()
    moved, refused = "vllm:statelink_transfer_bytes_count", "vllm:statelink_declined_transfers_total"
    for server in (pair.prefill, pair.decode):
        forget(server)
        before = sum(server.metric("vllm:external_prefix_cache_hits_total"))
        assert server.complete(prompt, 8).tokens == expected
        assert sum(server.metric("vllm:external_prefix_cache_hits_total")) >= before + 256, "nothing was loaded"
    for server in (pair.prefill, pair.decode):
        forget(server)
    count, declined = sum(pair.decode.metric(moved)), sum(pair.prefill.metric(refused))
    assert pair.route(prompt).tokens == expected
    pair.settled()
    if first:
        pair.decode.wait_counted(moved, count + 1)
    else:
        pair.prefill.wait_counted(refused, declined + 1)


@pytest.mark.shows("two servers: MultiConnector, prefill is killed while state is moved")
def test_prefill_that_is_killed(tmp_path: Path, llama: Path) -> None:
    with servers(tmp_path, llama, first=True) as pair:
        prompt = prompt_of(8, 300)
        expected = pair.prefill.complete(prompt, 8).tokens
        params = pair.prefill.complete(prompt, 1, dict(PREFILL)).body["kv_transfer_params"]
        pair.prefill.kill()
        answer = pair.decode.complete(prompt, 8, params)
        assert (answer.status, answer.tokens) == (200, expected)
        assert pair.decode.complete(prompt_of(9, 90), 4).status == 200
        pair.decode.wait_usage(False)
        pair.decode.wait_counted("vllm:statelink_failed_transfers_total", 1)


@pytest.mark.shows("two servers: MultiConnector with a connector that lacks the hybrid cache manager")
def test_a_connector_that_turns_the_hybrid_cache_manager_off(tmp_path: Path, llama: Path) -> None:
    """vLLM then keeps every layer's tokens whole, and Statelink moves them so."""

    def around(name: str, config: dict[str, Any]) -> dict[str, Any]:
        shared = {"shared_storage_path": str(tmp_path / f"{name}-store")}
        other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": shared}
        return several(dict(config), other, first=True)

    pair = ServerPair(tmp_path, llama, dict(QUICK), around=around)
    with running(pair):
        for length in (7, 100, 333):
            prompt = prompt_of(length, length)
            assert pair.route(prompt).tokens == pair.prefill.complete(prompt, 8).tokens
        assert sum(pair.decode.metric("vllm:statelink_failed_transfers_total")) == 0
        pair.decode.wait_counted("vllm:statelink_transfer_bytes_count", 3)
        pair.settled()


@pytest.mark.parametrize("at_once", [False, True], ids=["serial router", "both at once"])
@pytest.mark.shows("two servers: MultiConnector, the other connector cannot load")
def test_what_the_other_connector_cannot_load_is_computed(at_once: bool, tmp_path: Path, llama: Path) -> None:
    """Prefill computes the prompt again, and sends nothing of the blocks that were not loaded.

    vLLM 0.33 does not compute it right with its second model runner and scheduling ahead, on one server neither.
    """
    store = tmp_path / "store"

    def around(name: str, config: dict[str, Any]) -> dict[str, Any]:
        if name != "prefill":
            return config
        other = {
            "kv_connector": "FailingConnector",
            "kv_connector_module_path": "support.failing_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        }
        return several(dict(config), other, first=False)

    listen = f"tcp://127.0.0.1:{free_port()}"
    own = ({"listen": listen}, {"peers": {PREFILL_NAME: [listen]}})
    runs = {
        "environment": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"},
        "prefill": ["--no-async-scheduling"],
    }
    with running(ServerPair(tmp_path, llama, dict(QUICK), own=own, around=around, **runs)) as pair:
        prompts = [prompt_of(length, length) for length in (64, 100, 333)]
        expected = [pair.decode.complete(prompt, 8).tokens for prompt in prompts]
        forget(pair.decode)
        assert [pair.prefill.complete(prompt, 8).tokens for prompt in prompts] == expected  # now it is stored
        (store / FAILS).touch()
        for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            forget(pair.prefill)
            answer = pair.route_to_both(prompt, 8, f"request-{number}") if at_once else pair.route(prompt, 8)
            assert (answer.status, answer.tokens) == (200, tokens), answer
        assert "External Cache Hit!" in pair.prefill.logged()
        assert "Inject KV cache" not in pair.prefill.logged()
        pair.settled()
