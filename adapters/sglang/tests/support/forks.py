"""A process that has imported SGLang once, and forks every server: a pair is up in a fifth of the time.

Everything but the imports is as in an ordinary server: each has its own launcher, scheduler, detokenizer, plugins and
HTTP port. SGLang spawns its schedulers, and here they are forked, too. `torch.compile` hangs after a fork and is off.

Run as ``python -m support.forks DESCRIPTOR``, where the descriptor is that of a connected socket.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from engine_environments import SGLANG

__all__ = ["PATH", "ForkedServer", "fork_server"]

TESTS = Path(__file__).parents[1]
PATH = (TESTS, TESTS.parents[1] / "testing")
"""Where the process finds what it imports."""
IMPORTED = (
    "torch",
    "transformers",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "sglang.launch_server",
    "statelink_sglang.backend",
)
"""Modules that take long, and that every server needs."""


class _Order(NamedTuple):
    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: str


class ForkedServer:
    """A server that another process forked: what of `subprocess.Popen` the tests use.

    Attributes:
        pid: Of the server's first process, which leads a process group.
        returncode: How it ended; ``None`` while it runs.
    """

    def __init__(self, forks: _Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"the forked server {self.pid}", timeout or 0.0)
            time.sleep(0.05)
        return status


def fork_server(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedServer:
    """Start a server.

    Args:
        arguments: Of ``python -m sglang.launch_server``.
        environment: All variables of its environment.
        log: Where what it prints goes.
    """
    log.touch()
    return _forks().fork(_Order(tuple(arguments), dict(environment), str(log)))


@functools.cache
def _forks() -> _Forks:
    return _Forks()


class _Forks:
    """The process that forks, from outside. It ends, with all of its servers, when this process does."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = [*map(str, PATH), os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **SGLANG, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        with ours, theirs:
            command = [sys.executable, "-W", "ignore", "-m", "support.forks", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=given, start_new_session=True
            )
            self._pipe = Connection(ours.detach())
        self._ended: dict[int, int] = {}

    def fork(self, order: _Order) -> ForkedServer:
        self._pipe.send(tuple(order))
        while True:
            what, pid, status = self._receive()
            if what == "started":
                return ForkedServer(self, pid)
            self._ended[pid] = status

    def status(self, pid: int) -> int | None:
        while self._pipe.poll(0):
            _, ended, status = self._receive()
            self._ended[ended] = status
        return self._ended.get(pid)

    def _receive(self) -> tuple[str, int, int]:
        try:
            found: tuple[str, int, int] = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"the process that forks servers ended: {self._process.wait(60)}") from error
        return found


def serve(descriptor: int) -> None:
    """Fork servers until the other end is closed, and say when one ended. One thread, so that forks are safe."""
    from support import kernels

    kernels.before_imports()
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    # A forked process has torch's pool of threads without the threads, until it is told to make them.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
    torch._dynamo.config.disable = True  # noqa: SLF001
    kernels.after_imports()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    pipe, servers = Connection(descriptor), set[int]()
    while True:
        ready, _, _ = select.select([pipe.fileno(), read], [], [])
        if read in ready:
            os.read(read, 4096)
            for pid in sorted(servers):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    servers.discard(pid)
                    pipe.send(("ended", pid, os.waitstatus_to_exitcode(status)))
        if pipe.fileno() in ready:
            try:
                order = _Order(*pipe.recv())
            except (EOFError, OSError):
                break
            pid = os.fork()
            if not pid:
                for each in (read, write, pipe.fileno()):
                    os.close(each)
                _become(order)
            servers.add(pid)
            pipe.send(("started", pid, 0))
    for pid in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _become(order: _Order) -> None:
    """Be a server. Does not return."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(order.environment)
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = _ignore  # SGLang asks for spawned processes
        sys.argv = ["sglang.launch_server", *order.arguments]
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        run_server(prepare_server_args(list(order.arguments)))
    except SystemExit as ended:
        _leave(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _ignore(*args: Any, **more: Any) -> None:
    """Does nothing."""


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    # Not as `__main__`: SGLang's processes that are forked later look the main module up by its name.
    importlib.import_module("support.forks").serve(int(sys.argv[1]))
