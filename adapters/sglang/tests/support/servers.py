"""Real SGLang servers on the CPU: each with its launcher, scheduler and detokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

READY_SECONDS = float(os.environ.get("STATELINK_ENGINE_READY", "420"))
ANSWER_SECONDS = 300.0


class Answer(NamedTuple):
    """What a server answered: the HTTP status and the decoded body."""

    status: int
    body: Any

    @property
    def tokens(self) -> list[int]:
        found: list[int] = self.body["output_ids"]
        return found

    @property
    def text(self) -> str:
        return json.dumps(self.body)


class Server:
    """One server, and everything that it started."""

    def __init__(self, name: str, folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.name, self.port = name, free_port()
        self.log = folder / f"{name}.log"
        command = [
            *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--dtype", "float32"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disable-overlap-schedule", "--skip-server-warmup", "--max-running-requests", "8"),
            *arguments,
        ]
        own = {
            "STATELINK_ABSENT_PACKAGES": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._file = self.log.open("ab")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own, **environment},
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> Server:
        """Return once it answers.

        Raises:
            RuntimeError: It ended, or takes too long. The error has the end of its log.
        """
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if not self.running:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self.logged()[-6000:]}")
            with contextlib.suppress(OSError):
                if self.ask("/health", timeout=5).status == 200:
                    return self
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not ready after {READY_SECONDS:g} s:\n{self.logged()[-6000:]}")

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_logged(self, text: str, seconds: float = 60.0) -> None:
        """Wait until the log has a text."""
        until = time.monotonic() + seconds
        while text not in self.logged():
            assert time.monotonic() < until, f"{self.name} did not log {text!r}:\n{self.logged()[-6000:]}"
            time.sleep(0.2)

    def wait_end(self, seconds: float = READY_SECONDS) -> str:
        """Wait until it has ended by itself, and return its log."""
        self._process.wait(seconds)
        return self.logged()

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

    def tell(self, path: str, **body: Any) -> None:
        """POST an order to the server, which must take it."""
        answer = self.ask(path, body)
        assert answer.status == 200, (path, answer)

    def kill(self) -> None:
        """End the server and everything that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._file.close()


class Pair:
    """A prefill server and a decode server, or several, that share options."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        config: dict[str, Any],
        *,
        common: Sequence[str] = (),
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._folder, self._environment = folder, {"STATELINK_SGLANG_CONFIG": json.dumps(config), **(environment or {})}
        self.bootstrap_port = free_port()
        shared = ["--model-path", str(model), "--max-total-tokens", "2048", *common]
        shared += ["--disaggregation-transfer-backend", "statelink"]
        port = ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        self._arguments = {
            "prefill": [*shared, *port, "--disaggregation-mode", "prefill", *prefill],
            "decode": [
                *(*shared, "--disaggregation-mode", "decode"),
                *("--disaggregation-decode-retraction-backup", "cpu_tensor", *decode),
            ],
        }
        self.prefill = self.start("prefill")
        self.decode = self.start("decode")

    def start(self, role: str) -> Server:
        return Server(role, self._folder, self._arguments[role], self._environment)

    def wait_ready(self) -> Pair:
        self.prefill.wait_ready()
        self.decode.wait_ready()
        return self

    def body(self, prompt: Sequence[int], count: int = 8, **more: Any) -> dict[str, Any]:
        """A request as SGLang's router posts it to both servers."""
        return {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.SystemRandom().randrange(1, 1 << 63),
            **more,
        }

    def generate(self, prompt: Sequence[int], count: int = 8, **more: Any) -> tuple[Answer, Answer]:
        """The answers of both servers."""
        body = self.body(prompt, count, **more)
        first = Posted(self.prefill, body)
        second = Posted(self.decode, body)
        return first.answer(), second.answer()

    def close(self) -> None:
        self.prefill.kill()
        self.decode.kill()


class Posted:
    """A request that was sent, and whose answer comes later."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self._found: list[Answer | Exception] = []
        self._thread = threading.Thread(target=self._ask, args=(server, body), daemon=True)
        self._thread.start()

    def _ask(self, server: Server, body: dict[str, Any]) -> None:
        try:
            self._found.append(server.ask("/generate", body))
        except Exception as error:
            self._found.append(error)

    def answered(self, seconds: float) -> bool:
        """Whether the answer comes within some seconds."""
        self._thread.join(seconds)
        return bool(self._found)

    def answer(self, seconds: float = ANSWER_SECONDS) -> Answer:
        self._thread.join(seconds)
        assert self._found, "the server does not answer"
        found = self._found[0]
        if isinstance(found, Exception):
            raise found
        return found


@contextlib.contextmanager
def running(pair: Pair) -> Iterator[Pair]:
    """A pair that is ready, and is ended afterwards."""
    try:
        yield pair.wait_ready()
    finally:
        pair.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
