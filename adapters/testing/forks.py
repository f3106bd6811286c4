"""A process that has imported an engine once, and forks others from there: they are up in a fifth of the time.

Everything but the imports is as in a process that is started alone. A module says what is imported and what a forked
process does: it has ``PATH``, where its process finds modules, ``IMPORTED``, the names of modules that take long, and
three functions. ``prepare()`` is called before they are imported, ``settle()`` afterwards, and ``become(arguments)`` in
each forked process.

Run as ``python -m forks MODULE DESCRIPTOR``, where the descriptor is that of a connected socket.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

__all__ = ["Forked", "forks", "serve"]

MOST_BYTES = 1 << 18
"""Most bytes of a message: an environment, mostly."""


class _Order(NamedTuple):
    arguments: tuple[str, ...]
    environment: dict[str, str]


class Forked:
    """A process that another process forked: what of `subprocess.Popen` the tests use.

    Attributes:
        pid: Of the process, which leads a process group.
        returncode: How it ended; ``None`` while it runs.
        stdin: Writes to its standard input, if that is a pipe.
        stdout: Reads its standard output, if that is a pipe.
    """

    def __init__(self, made_by: _Forks, pid: int, stdin: IO[str] | None, stdout: IO[str] | None) -> None:
        self._made_by, self.pid = made_by, pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it ended; ``None`` while it runs."""
        if self.returncode is None:
            self.returncode = self._made_by.status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"the forked process {self.pid}", timeout or 0.0)
            time.sleep(0.05)
        return status


@functools.cache
def forks(
    module: str, path: tuple[str, ...], environment: tuple[tuple[str, str], ...] = (), python: str = sys.executable
) -> _Forks:
    """The process that forks for a module, made once for each choice of arguments.

    Args:
        module: Its name, and see this file.
        path: Where the process finds what it imports.
        environment: Changes to this process's environment.
        python: The interpreter, which may have another release of the engine.
    """
    return _Forks(module, path, dict(environment), python)


class _Forks:
    """The process that forks, from outside. It ends, with all that it forked, when this process does."""

    def __init__(self, module: str, path: Sequence[str], environment: Mapping[str, str], python: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        entries = [*path, os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, entries))}
        with theirs:
            command = [python, "-W", "ignore", "-m", "forks", module, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=given, start_new_session=True
            )
        self._ended: dict[int, int] = {}

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes], *, piped: bool) -> Forked:
        """Fork a process.

        Args:
            arguments: What it gets.
            environment: All variables of its environment.
            log: Where what it prints goes.
            piped: Whether its standard input and output are pipes, and not nothing and the log.
        """
        with contextlib.ExitStack() as closing:
            stdin = stdout = None
            if piped:
                theirs_in, ours_in = os.pipe()
                ours_out, theirs_out = os.pipe()
                given = [theirs_in, theirs_out]
                stdin, stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
            else:
                given = [os.open(os.devnull, os.O_RDONLY), os.dup(log.fileno())]
            for each in given:
                closing.callback(os.close, each)
            order = pickle.dumps(tuple(_Order(tuple(arguments), dict(environment))))
            socket.send_fds(self._socket, [order], [*given, log.fileno()])
        while True:
            what, pid, status = self._receive()
            if what == "started":
                return Forked(self, pid, stdin, stdout)
            self._ended[pid] = status

    def status(self, pid: int) -> int | None:
        while select.select([self._socket], [], [], 0)[0]:
            _, ended, status = self._receive()
            self._ended[ended] = status
        return self._ended.get(pid)

    def _receive(self) -> tuple[str, int, int]:
        message = self._socket.recv(MOST_BYTES)
        if not message:
            raise RuntimeError(f"the process that forks others ended: {self._process.wait(60)}")
        found: tuple[str, int, int] = pickle.loads(message)
        return found


def serve(name: str, descriptor: int) -> None:
    """Fork processes until the other end is closed, and say when one ended. One thread, so that forks are safe."""
    module = importlib.import_module(name)
    module.prepare()
    for each in module.IMPORTED:
        importlib.import_module(each)
    import torch

    torch.set_num_threads(1)
    # A forked process has torch's pool of threads without the threads, until it is told to make them.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
    torch._dynamo.config.disable = True  # noqa: SLF001  # it hangs after a fork
    module.settle()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    orders, running = socket.socket(fileno=descriptor), set[int]()
    while True:
        ready, _, _ = select.select([orders.fileno(), read], [], [])
        if read in ready:
            os.read(read, 4096)
            for pid in sorted(running):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    running.discard(pid)
                    orders.send(pickle.dumps(("ended", pid, os.waitstatus_to_exitcode(status))))
        if orders.fileno() in ready:
            message, streams, _, _ = socket.recv_fds(orders, MOST_BYTES, 3)
            if not message:
                break
            pid = os.fork()
            if not pid:
                for each in (read, write, orders.detach()):
                    os.close(each)
                _begin(module, _Order(*pickle.loads(message)), streams)
            for stream in streams:
                os.close(stream)
            running.add(pid)
            orders.send(pickle.dumps(("started", pid, 0)))
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _begin(module: Any, order: _Order, streams: Sequence[int]) -> None:
    """Be what the module makes of a process. Does not return."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for stream in streams:
            if stream > 2:
                os.close(stream)
        sys.stdin = os.fdopen(0)
        os.environ.clear()
        os.environ.update(order.environment)
        # Python looks at this variable when a process starts, and a forked one has started already.
        more = order.environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path += [each for each in more if each and each not in sys.path]
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = _ignore  # engines ask for spawned processes
        module.become(order.arguments)
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
    # Not as `__main__`: processes that are forked later look the main module up by its name.
    importlib.import_module("forks").serve(sys.argv[1], int(sys.argv[2]))
