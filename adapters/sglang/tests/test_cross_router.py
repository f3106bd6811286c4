"""The router between two engines: decode on SGLang takes what it says of vLLM. Stand-ins answer for both engines."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from statelink_sglang.backend import Directory

pytestmark = pytest.mark.smoke

ROUTER = Path(__file__).parents[2] / "cross" / "src" / "router.py"
PEER = ["tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"]
COMPLETED = {
    "choices": [{"token_ids": [5]}],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "prefill-0", "peer": PEER, "room": "17"},
}


class Engine(BaseHTTPRequestHandler):
    """Answers as vLLM's prefill, and as SGLang's decode."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"output_ids": [5, 6]} if self.path == "/generate" else COMPLETED).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def router() -> Any:
    spec = importlib.util.spec_from_file_location("cross_router", ROUTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_decode_learns_where_prefills_links_are(router: Any, engine: str) -> None:
    directory = Directory(interval=0.02)
    with router.serve(("127.0.0.1", 0), lambda here: router.VllmToSglang(engine, engine, "model", here)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"127.0.0.1:{server.server_port}"
        try:
            assert router.ask(here, "POST", "/generate", {"prompt": [1, 2], "max_tokens": 2}) == {"token_ids": [5, 6]}
            until = time.monotonic() + 30
            while (found := directory.find(here)) is None:
                assert time.monotonic() < until, directory.why(here)
                time.sleep(0.02)
        finally:
            directory.close()
            server.shutdown()
    assert [(each.name, each.addresses) for each in found.instances] == [("prefill-0", tuple(PEER))]
    assert found.follow_bootstrap_room
