"""vLLM's own parser takes the command lines of the pages, and the adapter the configurations and the requests.

Stand-ins answer the requests. No engine starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.entrypoints.common.cli_args", reason="the pages are for vLLM's newest release")

from pages import commands, objects, with_keys
from try_it import block
from vllm.config import KVTransferConfig
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from statelink_vllm.connector import Place, Prefix, Source, Wanted, answer, read_options, wanted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

ROOM = 77
THERE = "tcp://127.0.0.1:7100"
PREFILL = read_options("kv_producer", {})
DECODE = read_options("kv_consumer", {})
NAMED = read_options("kv_consumer", {"peers": {"prefill-0": [THERE]}})


def _wanted(said: dict[str, Any], options: Any) -> Wanted:
    return wanted(said, Place(0, 0, "request", several=False), options, b"secret")


@pytest.mark.parametrize(
    ("page", "roles"),
    [("vllm.md", ["kv_producer", "kv_consumer"]), ("two-engines.md", ["kv_consumer"]), ("moving.md", ["kv_both"])],
)
def test_vllm_takes_the_command_lines(page: str, roles: list[str]) -> None:
    parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    found = [parser.parse_args(words) for words in commands(page, "vllm serve")]
    assert [each.model_tag for each in found] == ["MODEL"] * len(roles)
    assert [each.kv_transfer_config.kv_role for each in found] == roles


@pytest.mark.parametrize(
    ("page", "count"), [("vllm.md", 3), ("adapters.md", 1), ("two-engines.md", 1), ("llm-d.md", 1), ("dynamo.md", 2)]
)
def test_vllm_and_the_adapter_take_the_configurations(tmp_path: Path, page: str, count: int) -> None:
    """Also those of connectors within another."""
    for given in objects(page, r'(?=\{\s*"kv_connector")'):
        KVTransferConfig(**given)
    ours = [each for each in objects(page, r'"kv_connector_extra_config":\s*(?=\{)') if "vllm" in each]
    assert len(ours) == count
    for given in ours:
        for role in ("kv_producer", "kv_consumer"):
            assert read_options(role, with_keys(given, tmp_path)).allow == {"cuda"}


class _StandIn(BaseHTTPRequestHandler):
    """Notes what it is asked, and answers as prefill does."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.asked.append((self.path, self.headers["Content-Type"], body))
        said = json.dumps({"kv_transfer_params": answer([Prefix(ROOM, 9, b"\x01")], "prefill-0", [THERE])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="the page's commands are curl and jq")
def test_the_commands_pass_prefills_answer_to_decode() -> None:
    servers = [HTTPServer(("127.0.0.1", 0), _StandIn) for _ in range(2)]
    asked: list[list[tuple[str, str, dict[str, Any]]]] = []
    shown = block("vllm.md", "ask()")
    threads = []
    for theirs, server in zip(("8100", "8200"), servers, strict=True):
        shown = shown.replace(theirs, str(server.server_port))
        asked.append([])
        server.asked = asked[-1]  # type: ignore[attr-defined]
        threads.append(threading.Thread(target=server.serve_forever))
        threads[-1].start()
    try:
        unproxied = {**os.environ, "no_proxy": "127.0.0.1"}
        subprocess.run(["bash", "-euc", shown], env=unproxied, check=True, timeout=60, stdout=subprocess.DEVNULL)
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
    said = []
    for ((path, kind, body),), tokens in zip(asked, (1, 8), strict=True):
        assert (path, kind) == ("/v1/completions", "application/json")
        assert CompletionRequest(**body).max_tokens == tokens
        said.append(body["kv_transfer_params"])
    assert _wanted(said[0], PREFILL).room
    assert _wanted(said[1], DECODE) == Wanted(
        Source(ROOM, (THERE,)), answered=b"\x01", offered=(Prefix(ROOM, 9, b"\x01"),)
    )


def test_what_a_router_adds_is_wanted() -> None:
    """The parts of requests that vllm.md shows."""
    sends = objects("vllm.md", r'"kv_transfer_params": (?=\{"do_remote_decode")') + objects(
        "vllm.md", r'(?=\{"do_remote_decode": true, "transfer_id")'
    )
    (receives,) = objects("vllm.md", r'(?=\{"do_remote_prefill": true)')
    rooms = [_wanted(each, PREFILL).room for each in sends]
    assert len(rooms) == 2
    assert all(rooms)
    source = _wanted(receives, NAMED).source
    assert source is not None
    assert source.room == rooms[-1]
