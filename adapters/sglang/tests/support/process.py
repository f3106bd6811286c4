"""Processes of their own for the ranks of a test, driven by calls over a pipe; and what runs inside them.

Run as ``python -m support.process DESCRIPTOR``, where the descriptor is that of a connected socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine_environments import SGLANG

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parents[2]
PATH = (TESTS, ROOT, TESTS.parents[1] / "testing", ROOT / "tests" / "helpers" / "plugins")
"""Where the process finds what it imports."""
PATIENCE = 90.0
"""Seconds after which a process counts as stuck."""
START = 420.0
"""Seconds that SGLang's imports may take on a busy machine."""


class Process:
    """One operating-system process with ranks in it.

    Args:
        name: For messages.
        log: Where what it prints goes.
        inside: A command that runs the one that follows it in another place, such as a network namespace.
        environment: Changes to this process's environment.
    """

    def __init__(
        self, name: str, log: Path, inside: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        ours, theirs = socket.socketpair()
        path = [*map(str, PATH), os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **SGLANG, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, path))}
        with ours, theirs, log.open("ab") as file:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-W", "ignore", "-m", "support.process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=given,
            )
            self._pipe = Connection(ours.detach())

    def call(self, method: str, *arguments: Any, patience: float = PATIENCE, **named: Any) -> Any:
        """Call a method of the `Host` inside; what it raises is raised here as a `RuntimeError` with its text."""
        self.ask(method, *arguments, **named)
        return self.answer(patience)

    def ask(self, method: str, *arguments: Any, **named: Any) -> None:
        """The first half of a call."""
        self._pipe.send((method, arguments, named))

    def answer(self, patience: float = PATIENCE) -> Any:
        """The second half of a call.

        Raises:
            RuntimeError: The call failed, or the process ended.
            TimeoutError: There is no answer.
        """
        if not any(self._pipe.poll(1.0) for _ in range(int(patience))):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGABRT)  # its fault handler prints every stack
            raise TimeoutError(f"{self.name} does not answer:\n{self.logged()[-4000:]}")
        try:
            good, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise RuntimeError(f"{self.name} ended: {self.process.wait(60)}\n{self.logged()[-4000:]}") from error
        if not good:
            raise RuntimeError(answer)
        return answer

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Let it stand still, until `go_on`."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until no thread of it runs

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it, at once."""
        if self.running:
            self.process.kill()
        self.process.wait(60)
        self._pipe.close()


class Host:
    """What lives in a process. A test can call its methods, and those of a rank by the rank's key."""

    def __init__(self) -> None:
        self.ranks: dict[str, Any] = {}
        self._published: Any = None

    def publish(self, role: str, connector: str, model: str, host: str = "127.0.0.1") -> None:
        """Import SGLang, and publish its configuration."""
        from . import connectors

        self.role, self.connector, self.host = role, connector, host
        self._published = connectors.publish(role, connector, model, 0, host)

    def start(
        self,
        key: str,
        made: tuple[str, str, dict[str, Any]],
        port: int,
        config: dict[str, Any],
        at: str = "",
        **more: Any,
    ) -> None:
        """Make a rank.

        Args:
            key: Its name in this process.
            made: A module, a function of it that makes the pools, and the function's keywords.
            port: The bootstrap server's.
            config: Of Statelink.
            at: The bootstrap server's host, if it is another than this process's.
            more: See `support.rank.Rank`.
        """
        from . import connectors
        from .rank import Rank

        module, function, named = made
        pools = getattr(importlib.import_module(module), function)(**named)
        with connectors.configured(json.dumps(config)):
            where = at or self.host, port
            self.ranks[key] = Rank(self.role, self.connector, self._published, pools, where, **more)

    def rank(self, key: str, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.ranks[key], method)(*arguments, **named)

    def run(self, module: str, function: str, *arguments: Any) -> Any:
        """Call a function with this host and the arguments."""
        return getattr(importlib.import_module(module), function)(self, *arguments)

    def plain(self, module: str, function: str, *arguments: Any) -> Any:
        """Call a function with the arguments."""
        return getattr(importlib.import_module(module), function)(*arguments)


def serve(descriptor: int) -> None:
    """Answer calls until the other end is closed."""
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING)
    pipe, host = Connection(descriptor), Host()
    while True:
        try:
            method, arguments, named = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # threads of the libraries may not end
        try:
            answer = True, getattr(host, method)(*arguments, **named)
        except Exception as error:
            traceback.print_exc()
            answer = False, f"{type(error).__name__}: {error}"
        pipe.send(answer)


@contextlib.contextmanager
def processes(folder: Path, *names: str, environment: Mapping[str, str] | None = None) -> Iterator[list[Process]]:
    """Processes that are killed in the end."""
    made = [Process(name, folder / f"{name}.log", environment=environment) for name in names]
    try:
        yield made
    finally:
        for each in made:
            each.kill()


if __name__ == "__main__":
    # Not as `__main__`: what is sent over the pipe names its module.
    importlib.import_module("support.process").serve(int(sys.argv[1]))
