"""Worker processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ._device import hold
from ._memory import MIB, Arena
from ._window import DeviceArena
from ._worker import ENDED, Host, Hung

__all__ = ["ARENA", "Died", "Pool", "Worker"]

RETURNS = "Let each call of the backend return, whatever its peers do: bound every wait."
ARENA = 640 * MIB
"""Bytes of each worker's memory. Untouched memory takes no space."""


class Died(AssertionError):
    """A worker ended unexpectedly. Usually a native library crashed."""


class Worker:
    """A process that calls functions. The first argument of each is its `Host`.

    Args:
        environment: Changes to this process's environment.
        patience: Seconds after which a call counts as stuck.
        memory: Kind of its memory, and its allocator, as for `statelink._devices.allocate`.

    Raises:
        BackendUnavailableError: There is no such memory here.
    """

    def __init__(self, environment: Mapping[str, str], patience: float, memory: tuple[str, str] = ("dram", "")) -> None:
        self.patience = patience
        self.memory = memory[0]
        self.arena: Arena | DeviceArena = Arena(ARENA)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in end()
        self._pending = False
        self.address = 0
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "statelink.testing._worker", str(theirs.fileno()), self.arena.path],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
            )
            self._pipe = Connection(ours.detach())
        if self.memory != "dram":
            try:
                self.address, path = self(hold, *memory, self.arena.path)
                self.arena = DeviceArena(path, self.arena)
            except BaseException:
                self.end()
                raise

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def idle(self) -> bool:
        """Whether the process runs and waits for a call."""
        return self.alive and not self._pending

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process. What it raises is raised here."""
        self.start(function, *arguments)
        return self.result()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call. `result` waits for its end."""
        assert not self._pending, "a worker makes one call at a time"
        try:
            self._pipe.send((function, arguments))
        except ENDED as error:
            raise self._died() from error
        self._pending = True

    def returns(self, within: float) -> bool:
        """Whether the call that `start` began returns within some seconds. `result` is still to be called."""
        return self._pipe.poll(within)

    def result(self) -> Any:
        """Wait for the call that `start` began. Returns its result, or raises what it raised."""
        if not self._pipe.poll(self.patience):
            if self.alive:
                self._process.send_signal(signal.SIGABRT)  # its fault handler prints all stacks
                self._process.wait(10)
            raise Hung(f"a call did not return within {self.patience:g} s\n{self.log()}", RETURNS)
        try:
            good, answer = self._pipe.recv()
        except ENDED as error:
            raise self._died() from error
        self._pending = False
        if not good:
            raise answer
        return answer

    def stop(self) -> None:
        """Stop the process, like a process whose host swaps, or which a debugger holds."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until no thread of it runs

    def go_on(self) -> None:
        """Let it run again. One that has ended stays so."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process. Returns when it has ended."""
        self._process.kill()
        self._process.wait()

    def leave(self) -> int:
        """Let the process end by itself. Returns its exit status."""
        self._pipe.close()
        return self._process.wait(self.patience)

    def log(self) -> str:
        """The end of its output."""
        self._log.seek(0)
        return self._log.read()[-4000:]

    def end(self) -> None:
        """End the process and free everything. May be called twice."""
        self.kill()
        if not self._log.closed:
            self._log.close()
            self._pipe.close()
            self.arena.close()

    def _died(self) -> Died:
        status = self._process.wait(10)
        return Died(f"the process ended with status {status}\n{self.log()}")


class Pool:
    """Workers that are used for several tests, because starting one may take seconds.

    Args:
        environment: Changes to their environment.
        patience: Seconds after which a call counts as stuck.
        memory: Kind of their memory, and its allocator.
    """

    def __init__(self, environment: Mapping[str, str], patience: float, memory: tuple[str, str] = ("dram", "")) -> None:
        self._environment = environment
        self._patience = patience
        self._memory = memory
        self._free: list[Worker] = []
        self._taken: list[Worker] = []

    def take(self) -> Worker:
        """A worker without open backends.

        Raises:
            BackendUnavailableError: There is no such memory here.
        """
        self._free = [worker for worker in self._free if worker.alive]
        worker = self._free.pop() if self._free else Worker(self._environment, self._patience, self._memory)
        worker.patience = self._patience
        self._taken.append(worker)
        return worker

    def give_back(self, workers: Sequence[Worker]) -> None:
        """Take workers back, and close what is open in them, in all of them at once."""
        self._taken = [worker for worker in self._taken if worker not in workers]
        idle = [worker for worker in workers if worker.idle]
        failures: list[BaseException] = []
        for worker in idle:
            worker.start(Host.close_all)
        for worker in workers:
            try:
                if worker in idle:
                    worker.result()
                    self._free.append(worker)
                    continue
            except (Exception, Died) as error:
                failures.append(error)
            worker.end()
        if failures:
            raise failures[0]

    def end(self) -> None:
        """End all."""
        for worker in (*self._free, *self._taken):
            worker.end()
        self._free, self._taken = [], []
