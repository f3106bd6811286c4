"""Servers that cannot start as they are, and servers that do not fit: each says why, and what can live lives."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from engine_processes import READY_SECONDS, free_port, running
from support.models import make_windowed
from support.servers import Pair, Server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


class Wrong(NamedTuple):
    """A server that cannot start.

    Attributes:
        said: What its log says.
        config: `STATELINK_SGLANG_CONFIG`.
        environment: Other variables.
        module: A module that stands in the way of a package's, and what is in it.
        role: Of the server.
    """

    said: tuple[str, ...]
    config: dict[str, Any]
    environment: Mapping[str, str] = MappingProxyType({})
    module: tuple[str, str] = ("", "")
    role: str = "decode"


TCP = {"backend": "tcp"}
WRONG = {
    "an unknown backend": Wrong(("no backend named 'tpc'", "tcp"), {"backend": "tpc"}),
    "an unknown key": Wrong(("unknown key 'backends'", "'backend'"), {"backends": "tcp"}),
    "a backend whose library does not load": Wrong(
        ("nixl", "libucs.so.0: cannot open shared object file"),
        {"backend": "nixl"},
        module=("nixl", "raise ImportError('libucs.so.0: cannot open shared object file')"),
    ),
    "a variable that contradicts": Wrong(
        (
            "this decode server cannot use the transfer backend 'statelink'",
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE must not be false",
        ),
        TCP,
        {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "false"},
    ),
    "an adapter that does not load": Wrong(
        ("statelink_sglang", "half installed", "invalid choice: 'statelink'"),
        TCP,
        module=("statelink_sglang", "raise ImportError('half installed')"),
    ),
    "an adapter that is left out": Wrong(("invalid choice: 'statelink'",), TCP, {"SGLANG_PLUGINS": "another"}),
    "a bootstrap port in use": Wrong(("choose another --disaggregation-bootstrap-port",), TCP, role="prefill"),
}


@pytest.fixture(scope="module")
def started(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """All of them, at once: each takes long to import what it needs."""
    servers = {}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, wrong in WRONG.items():
            folder = tmp_path_factory.mktemp("wrong")
            environment = {"STATELINK_SGLANG_CONFIG": json.dumps(wrong.config), **wrong.environment}
            module, text = wrong.module
            if module:
                (folder / f"{module}.py").write_text(text)
                environment["PYTHONPATH"] = str(folder)
            arguments = ["--model-path", str(llama), "--max-total-tokens", "2048"]
            arguments += ["--disaggregation-mode", wrong.role, "--disaggregation-transfer-backend", "statelink"]
            arguments += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
            arguments += ["--disaggregation-bootstrap-port", port if wrong.role == "prefill" else str(free_port())]
            servers[name] = Server("server", folder, arguments, environment, ordinary=True)
        yield servers
        for server in servers.values():
            server.kill()


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_cannot_start_says_why(started: dict[str, Server], name: str) -> None:
    server, wrong = started[name], WRONG[name]
    for text in wrong.said:
        server.wait_logged(text, READY_SECONDS)
    if wrong.role == "decode":
        server.wait_end()


def test_servers_with_different_models_fail_the_request_and_live(llama: Path, tmp_path: Path) -> None:
    other = make_windowed(tmp_path / "windowed")
    common = ["--page-size", "16"]
    with running(Pair(tmp_path, other, TCP, common=common, decode=["--model-path", str(llama)])) as pair:
        body = pair.body(list(range(5, 45)))
        for _ in range(2):
            answer = pair.decode.ask("/generate", body)
            said = answer.text.replace("\\n", "\n")
            assert "prefill and decode do not describe the same state" in said
            assert "Cohere2ForCausalLM" in said
            assert "LlamaForCausalLM" in said
        assert "do not describe the same state" in pair.decode.logged()
        pair.prefill.wait_logged("refused this instance")
        for server in (pair.prefill, pair.decode):
            assert server.ask("/health").status == 200
