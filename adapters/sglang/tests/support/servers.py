"""Real SGLang servers on the CPU: each with its launcher, scheduler and detokenizer."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import engine_processes
from engine_environments import SGLANG, python_of
from engine_processes import ANSWER_SECONDS, HttpServer, free_port

from .forks import PATH, fork_server

if TYPE_CHECKING:
    from pathlib import Path


class Answer(engine_processes.Answer):
    """The same, as SGLang fills it."""

    @property
    def tokens(self) -> list[int]:
        found: list[int] = self.body["output_ids"]
        return found

    @property
    def text(self) -> str:
        return json.dumps(self.body)


class Server(HttpServer[Answer]):
    """One server, and everything that it started. It has the overlap schedule, as SGLang's servers have by default.

    Args:
        name: For messages, and for the log.
        folder: Where the log is.
        arguments: Options of SGLang's, after those that every server here has.
        environment: Changes to this process's environment.
        ordinary: Whether it is started as a user starts it, and not forked from a process with SGLang's imports.
        port: Where it takes requests, if it is to be a certain port.
    """

    answers = Answer

    def __init__(
        self,
        name: str,
        folder: Path,
        arguments: Sequence[str],
        environment: dict[str, str],
        *,
        ordinary: bool = False,
        port: int = 0,
    ) -> None:
        self._ordinary = ordinary
        command = [
            *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-server-warmup"),
            *("--max-running-requests", "8", *arguments),
        ]
        super().__init__(name, folder, command, {**SGLANG, **environment}, port)

    def _start(self, command: Sequence[str], environment: dict[str, str], pipes: dict[str, Any]) -> Any:
        if not self._ordinary:
            return fork_server(command, environment, self.log, python_of(self.name))
        path = [*map(str, PATH), environment.get("PYTHONPATH", "")]
        environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        return super()._start(
            [python_of(self.name), "-W", "ignore", "-m", "support.launch", *command], environment, pipes
        )

    def tell(self, path: str, **body: Any) -> None:
        """POST an order to the server, which must take it."""
        answer = self.ask(path, body)
        assert answer.status == 200, (path, answer)


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
        ordinary: bool = False,
    ) -> None:
        self._ordinary = ordinary
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

    def start(self, role: str, name: str = "", *more: str, port: int = 0) -> Server:
        """Start a server of a role, with more options, at a port of its own or at the given one.

        It has a name of its own if there are several of the role.
        """
        arguments = [*self._arguments[role], *more]
        return Server(name or role, self._folder, arguments, self._environment, ordinary=self._ordinary, port=port)

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


class Alone:
    """One server without disaggregation, to compare a pair with. A context manager: it is ready within."""

    def __init__(
        self, folder: Path, model: Path, arguments: Sequence[str], environment: dict[str, str] | None = None
    ) -> None:
        given = ["--model-path", str(model), "--max-total-tokens", "2048", *arguments]
        self.server = Server("alone", folder, given, environment or {})

    def __enter__(self) -> Alone:
        try:
            self.server.wait_ready()
        except BaseException:
            self.server.kill()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.server.kill()

    def generate(self, prompt: Sequence[int], count: int = 8, **more: Any) -> Answer:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        return self.server.ask("/generate", {"input_ids": list(prompt), "sampling_params": params, **more})


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
