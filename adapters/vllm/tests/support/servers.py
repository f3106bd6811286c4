"""Real vLLM servers on the CPU, each with its API server, engine core and workers, and a router that does the least."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .engines import ENVIRONMENT, PREFILL, READY_SECONDS, free_port, transfer

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_SECONDS = 240.0


class Answer(NamedTuple):
    """What a server answered: the HTTP status and the decoded body."""

    status: int
    body: Any

    @property
    def tokens(self) -> list[int]:
        found: list[int] = self.body["choices"][0]["token_ids"]
        return found


class Server:
    """One server, and everything that it started."""

    def __init__(self, name: str, folder: Path, model: Path, config: dict[str, Any], *options: str) -> None:
        self.name, self.port, self.model = name, free_port(), str(model)
        self.log = folder / f"{name}.log"
        command = [
            *(sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--skip-tokenizer-init", "--enforce-eager"),
            *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(16 << 20)),
            *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--block-size", "32"),
            *("--compilation-config", '{"custom_ops": ["none"]}', "--kv-transfer-config", json.dumps(config)),
            *options,
        ]
        self._file = self.log.open("ab")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    def wait_ready(self) -> Server:
        """Return once it answers.

        Raises:
            RuntimeError: It ended, or takes too long. The error has the end of its log.
        """
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self.logged()[-6000:]}")
            with contextlib.suppress(OSError):
                if self.ask("/health", timeout=5).status == 200:
                    return self
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not ready after {READY_SECONDS:g} s:\n{self.logged()[-6000:]}")

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, path: str, body: Any = None, timeout: float = ANSWER_SECONDS) -> Answer:
        """GET, or POST with a body.

        Raises:
            OSError: It does not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return Answer(status, json.loads(raw))
        except ValueError:
            return Answer(status, raw.decode(errors="replace"))

    def complete(self, prompt: Sequence[int], count: int, params: dict[str, Any] | None = None) -> Answer:
        """The completion of a prompt of token ids."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self.ask("/v1/completions", body if params is None else {**body, "kv_transfer_params": params})

    def kill(self) -> None:
        """End the server and everything that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._file.close()


class ServerPair:
    """A prefill server and a decode server."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        config: dict[str, Any],
        *,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
    ) -> None:
        self.prefill = Server("prefill", folder, model, transfer(config, kv_role="kv_producer"), *prefill)
        self.decode = Server("decode", folder, model, transfer(config, kv_role="kv_consumer"), *decode)

    def route(self, prompt: Sequence[int], count: int = 8) -> Answer:
        """What a serial router does: prefill's ``kv_transfer_params`` go to decode as they are."""
        first = self.prefill.complete(prompt, 1, dict(PREFILL))
        assert first.status == 200, first
        return self.decode.complete(prompt, count, first.body["kv_transfer_params"])

    def kill(self) -> None:
        self.prefill.kill()
        self.decode.kill()


@contextlib.contextmanager
def serving(pair: ServerPair) -> Iterator[ServerPair]:
    """A pair that is ready, and is ended afterwards."""
    try:
        pair.prefill.wait_ready()
        pair.decode.wait_ready()
        yield pair
    finally:
        pair.kill()
