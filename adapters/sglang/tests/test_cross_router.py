"""The router between two engines: decode on SGLang takes what it says of vLLM. Stand-ins answer for both engines."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from support.bootstrap import answering, wait

from statelink_sglang.backend import Directory

pytestmark = pytest.mark.smoke

ROUTER = Path(__file__).parents[2] / "cross" / "src" / "router.py"
PEER = ["tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"]
COMPLETED = {
    "choices": [{"token_ids": [5]}],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "prefill-0", "peer": PEER, "room": "17"},
}


def engine(path: str, body: bytes) -> tuple[int, bytes]:
    """Answers as vLLM's prefill, and as SGLang's decode."""
    return 200, json.dumps({"output_ids": [5, 6]} if path == "/generate" else COMPLETED).encode()


@pytest.fixture
def router() -> Any:
    spec = importlib.util.spec_from_file_location("cross_router", ROUTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_decode_learns_where_prefills_links_are(router: Any) -> None:
    directory = Directory(interval=0.02)
    with (
        answering(engine) as at,
        router.serve(("127.0.0.1", 0), lambda here: router.VllmToSglang(at, at, "model", here)) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"127.0.0.1:{server.server_port}"
        try:
            assert router.ask(here, "POST", "/generate", {"prompt": [1, 2], "max_tokens": 2}) == {"token_ids": [5, 6]}
            found = wait(lambda: directory.find(here))
        finally:
            directory.close()
            server.shutdown()
    assert [(each.name, each.addresses) for each in found.instances] == [("prefill-0", tuple(PEER))]
    assert found.follow_bootstrap_room
