"""Real servers of both engines on the CPU, each in its own environment, and the router between them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_environments import SGLANG, VLLM, completion
from engine_processes import Answer, HttpServer, free_port

import router
from router import SglangToVllm, VllmToSglang, serve

LINK = {"backend": "tcp", "verify": "digest", "deadline": 60.0}
MODEL = "tiny-llama@1"
ADAPTERS = Path(__file__).parents[3]
PAGE, BLOCK = 16, 32
"""Tokens of a page on SGLang, and of a block on vLLM."""


class SglangServer(HttpServer[Answer]):
    """An SGLang server. ``role`` is ``prefill`` or ``decode``."""

    def __init__(self, role: str, folder: Path, model: Path) -> None:
        self.bootstrap = f"127.0.0.1:{free_port()}"
        command = [
            *(os.environ["STATELINK_SGLANG_PYTHON"], "-W", "ignore", "-m", "support.launch"),
            *("--model-path", str(model), "--device", "cpu", "--dtype", "float32", "--page-size", str(PAGE)),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disable-overlap-schedule", "--skip-server-warmup", "--max-running-requests", "8"),
            *("--max-total-tokens", "8192", "--disaggregation-mode", role),
            *("--disaggregation-transfer-backend", "statelink"),
            *("--disaggregation-bootstrap-port", self.bootstrap.rpartition(":")[2]),
            *(("--disaggregation-decode-retraction-backup", "cpu_tensor") if role == "decode" else ()),
        ]
        config = {**LINK, "sglang": {"model": MODEL, "rows": "optional"}}
        del config["deadline"]
        # The stand-ins of SGLang's own tests are in this server: releases lack different kernels on a CPU.
        path = os.pathsep.join(map(str, (ADAPTERS / "sglang" / "tests", ADAPTERS / "testing")))
        environment = {**SGLANG, "PYTHONPATH": path, "STATELINK_SGLANG_CONFIG": json.dumps(config)}
        super().__init__(f"sglang-{role}", folder, command, environment)


class VllmServer(HttpServer[Answer]):
    """A vLLM server that both prefills and decodes."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = str(model)
        # The stand-ins for a CPU's kernels fill pages so; no compiled kernels are in vLLM's wheel.
        extra = {**LINK, "vllm": {"model": MODEL, "pages": {"CPU_ATTN": "halves"}}}
        config = {
            "kv_connector": "StatelinkConnector",
            "kv_connector_module_path": "statelink_vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
        command = [
            *(os.environ["STATELINK_VLLM_PYTHON"], "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve"),
            *(self.model, "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"),
            *("--kv-cache-memory-bytes", str(16 << 20), "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
            *("--block-size", str(BLOCK), "--compilation-config", '{"custom_ops": ["none"]}'),
            *("--kv-transfer-config", json.dumps(config)),
        ]
        super().__init__("vllm", folder, command, VLLM)

    def alone(self, prompt: Sequence[int], count: int = 8) -> list[int]:
        """The tokens that it generates by itself."""
        answer = self.ask("/v1/completions", completion(self.model, prompt, count))
        assert answer.status == 200, answer
        tokens: list[int] = answer.body["choices"][0]["token_ids"]
        return tokens

    def moved(self) -> tuple[int, int]:
        """Requests whose state came here or went away so far, and their bytes, as its metrics say."""
        found = {"count": 0.0, "sum": 0.0}
        for line in str(self.ask("/metrics").body).splitlines():
            name, _, value = line.rpartition(" ")
            for which in found:
                if name.startswith(f"vllm:statelink_transfer_bytes_{which}"):
                    found[which] += float(value)
        return int(found["count"]), int(found["sum"])

    def wait_moved(self, expected: tuple[int, int], seconds: float = 60.0) -> None:
        """Wait until the metrics, which vLLM brings up to date after a step, say so."""
        until = time.monotonic() + seconds
        while (found := self.moved()) != expected:
            assert time.monotonic() < until, (found, expected)
            time.sleep(0.2)


class Servers:
    """A prefill server and a decode server of SGLang, and one server of vLLM."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.prefill, self.decode = (SglangServer(role, folder, model) for role in ("prefill", "decode"))
        self.vllm = VllmServer(folder, model)
        self.all = (self.prefill, self.decode, self.vllm)

    def router(self, way: str) -> Callable[[str], SglangToVllm | VllmToSglang]:
        """What makes the router of one direction."""
        vllm, model = _at(self.vllm), self.vllm.model
        if way == "sglang-to-vllm":
            return lambda here: SglangToVllm(_at(self.prefill), self.prefill.bootstrap, vllm, model)
        return lambda here: VllmToSglang(vllm, _at(self.decode), model, here)


def _at(server: HttpServer[Any]) -> str:
    return f"127.0.0.1:{server.port}"


@contextlib.contextmanager
def started(folder: Path, model: Path) -> Iterator[Servers]:
    """Servers that are ready, and are ended afterwards."""
    servers = Servers(folder, model)
    try:
        for server in servers.all:
            server.wait_ready()
        yield servers
    finally:
        for server in servers.all:
            server.kill()


class Routed:
    """Requests over one direction, through the router's own server.

    Attributes:
        name: The direction.
    """

    def __init__(self, name: str, port: int) -> None:
        self.name, self._where = name, f"127.0.0.1:{port}"

    def generate(self, prompt: Sequence[int], count: int = 8) -> list[int]:
        """The tokens after a prompt."""
        answer = router.ask(self._where, "POST", "/generate", {"prompt": list(prompt), "max_tokens": count})
        tokens: list[int] = answer["token_ids"]
        return tokens


@contextlib.contextmanager
def routed(servers: Servers, way: str) -> Iterator[Routed]:
    """The router of one direction."""
    server = serve(("127.0.0.1", 0), servers.router(way))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Routed(way, server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
