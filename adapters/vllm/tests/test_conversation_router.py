"""The router of the examples in front of two real servers: completions and streams of conversations, held and asked."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_environments import completion
from engine_processes import running
from support.engines import prompt_of
from support.servers import ServerPair

pytestmark = pytest.mark.servers

EXAMPLE = Path(__file__).parents[3] / "examples" / "conversation_router.py"


@pytest.fixture(scope="module")
def both(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    """Servers that receive and send."""
    servers = ServerPair(
        tmp_path_factory.mktemp("both"),
        llama,
        {"backend": "tcp", "verify": "digest"},
        around=lambda name, config: {**config, "kv_role": "kv_both"},
    )
    with running(servers) as made:
        yield made


@pytest.fixture(params=["held", "asked"])
def router(request: pytest.FixtureRequest, both: ServerPair) -> Iterator[tuple[str, Any]]:
    spec = importlib.util.spec_from_file_location("conversation_router", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hosts = [f"127.0.0.1:{server.port}" for server in (both.prefill, both.decode)]
    with module.Router(*hosts, 0, request.param) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield request.param, (module, f"127.0.0.1:{made.server_port}")
        finally:
            made.shutdown()
            thread.join()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.shows("two servers: conversations behind the router of the examples")
def test_each_turn_has_the_tokens_of_one_server(both: ServerPair, router: Any, stream: bool) -> None:
    mode, (module, at) = router
    history = prompt_of(len(mode) + stream, 120)
    before = sum(both.prefill.metric("vllm:statelink_transfer_seconds_count"))
    for turn, count in enumerate((40, 34, 5)):
        body = {**completion(both.prefill.model, history, count), "stream": stream}
        connection = module.http.client.HTTPConnection(at)
        headers = {"Content-Type": "application/json", "X-Conversation": f"{mode} {stream}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        lines = [line.removeprefix(b"data: ").strip() for line in answer]
        parts = [json.loads(line) for line in lines if line.startswith(b"{")]
        tokens = [token for part in parts for each in part["choices"] for token in each["token_ids"]]
        assert tokens == both.prefill.complete(history, count).tokens
        history = [*history, *tokens, *prompt_of(50 + turn, 30)]
    # Prefill has sent in each turn, and received in the second and third.
    both.prefill.wait_counted("vllm:statelink_transfer_seconds_count", before + 5)
    if mode == "held":
        assert both.decode.usage() > 0
        both.decode.complete([5], 1, {"extend": parts[-1]["kv_transfer_params"]["room"], "hold": 0})
    both.settled()
