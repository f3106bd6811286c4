"""Engines in processes of their own, and their HTTP servers: what the tests of every adapter share."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["READY_SECONDS", "Answer", "HttpServer", "OwnProcess", "free_port", "running"]

READY_SECONDS = float(os.environ.get("STATELINK_ENGINE_READY", "420"))
"""Seconds that an engine may take to start."""
ANSWER_SECONDS = 300.0


class OwnProcess:
    """A process, everything that it starts, and the log of what it prints.

    Args:
        name: For messages, and for the log.
        folder: Where the log is.
        command: Runs it.
        environment: Changes to this process's environment.
        pipes: Its standard input and output, if they are not nothing and the log.
    """

    def __init__(
        self, name: str, folder: Path, command: Sequence[str], environment: Mapping[str, str], **pipes: Any
    ) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._process = self._start(command, {**os.environ, **environment}, pipes)

    def _start(self, command: Sequence[str], environment: dict[str, str], pipes: dict[str, Any]) -> Any:
        """Start the process, as the leader of a process group. Returns a `subprocess.Popen`, or what is like one."""
        with self.log.open("ab") as file:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, **pipes}
            return subprocess.Popen(command, env=environment, start_new_session=True, text=True, **streams)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def logged(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")

    def wait_logged(self, text: str, seconds: float = 60.0) -> None:
        """Wait until the log has a text."""
        until = time.monotonic() + seconds
        while text not in self.logged():
            assert time.monotonic() < until, f"{self.name} did not log {text!r}:\n{self.logged()[-6000:]}"
            time.sleep(0.2)

    def wait_end(self, seconds: float = READY_SECONDS) -> int:
        """Wait until it has ended by itself, and return its exit status."""
        return int(self._process.wait(seconds))

    def terminate(self) -> None:
        """Ask it to end, as a supervisor does."""
        os.kill(self._process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Stop every thread of it, as a machine that hangs does. Returns when they stand still."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        with open(f"/proc/{self._process.pid}/stat", "rb", buffering=0) as stat:
            while stat.read().rpartition(b") ")[2][:1] not in b"TtZX":
                time.sleep(0.001)
                stat.seek(0)

    def go_on(self) -> None:
        """Let it run again."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it and everything that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)


class Answer(NamedTuple):
    """What a server answered: the HTTP status and the decoded body."""

    status: int
    body: Any


AnswerT = TypeVar("AnswerT", bound=Answer)


class HttpServer(OwnProcess, Generic[AnswerT]):
    """A server that says at ``/health`` that it is ready. See `OwnProcess`.

    Attributes:
        answers: What `ask` returns: `Answer`, or what derives from it.
        host: Where it listens.
        port: Where it listens there.
    """

    answers: ClassVar[Any] = Answer
    host = "127.0.0.1"

    def __init__(
        self, name: str, folder: Path, command: Sequence[str], environment: Mapping[str, str], port: int = 0
    ) -> None:
        self.port = port or free_port()
        super().__init__(name, folder, [*command, "--host", self.host, "--port", str(self.port)], environment)

    def wait_ready(self) -> None:
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
                    return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not ready after {READY_SECONDS:g} s:\n{self.logged()[-6000:]}")

    def ask(
        self, path: str, body: Any = None, timeout: float = ANSWER_SECONDS, headers: Mapping[str, str] | None = None
    ) -> AnswerT:
        """GET, or POST with a body: bytes as they are, and anything else as JSON.

        Raises:
            OSError: It does not answer.
        """
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"http://{self.host}:{self.port}{path}", data, given)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            body = json.loads(raw)
        except ValueError:
            body = raw.decode(errors="replace")
        made: AnswerT = self.answers(status, body)
        return made


class Engine(Protocol):
    """What `running` needs of an engine."""

    def wait_ready(self) -> object: ...
    def kill(self) -> None: ...


class TwoEngines(Protocol):
    """A prefill engine and a decode engine, which a test may start anew."""

    @property
    def prefill(self) -> Engine: ...
    @property
    def decode(self) -> Engine: ...


TwoEnginesT = TypeVar("TwoEnginesT", bound=TwoEngines)


@contextlib.contextmanager
def running(pair: TwoEnginesT) -> Iterator[TwoEnginesT]:
    """A pair that is ready, and is ended afterwards."""
    try:
        pair.prefill.wait_ready()
        pair.decode.wait_ready()
        yield pair
    finally:
        pair.prefill.kill()
        pair.decode.kill()


_given: set[int] = set()


def free_port() -> int:
    """A port at which nobody listens, and which no other call of this process returned.

    The kernel gives ports from 32,768 on to outgoing connections. One of those could take such a port before the server
    binds it, so the port is below them. Mooncake's library listens at random ports from 15,000 to 17,000, and SGLang's
    ranks at random ones from 22,000 to 29,999, so the port is between those.
    """
    free = sorted(set(range(17_001, 22_000)) - _given)
    for port in random.sample(free, 1_000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise OSError("none of 1,000 ports could be bound")
