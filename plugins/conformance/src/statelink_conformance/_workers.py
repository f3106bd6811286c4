"""Worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from statelink.testing.process import Process, ProcessError

from ._memory import MIB, Arena
from ._window import DeviceArena, hold
from ._worker import Host, Hung, called

__all__ = ["ARENA", "Died", "Pool", "Worker"]

RETURNS = "Let each call of the backend return, whatever its peers do: bound every wait."
ARENA = 640 * MIB
"""Bytes of each worker's memory. Untouched memory takes no space."""


class Died(AssertionError):
    """A worker ended unexpectedly. Usually a native library crashed."""


class Worker(Process[Host]):
    """A process with memory for backends. The first argument of each function is its `Host`.

    Args:
        environment: Changes to this process's environment.
        patience: Seconds after which a call counts as stuck.
        memory: Kind of its memory, and its allocator, as for `statelink._devices.allocate`.

    Raises:
        BackendUnavailableError: There is no such memory here.
    """

    def __init__(self, environment: Mapping[str, str], patience: float, memory: tuple[str, str] = ("dram", "")) -> None:
        self.memory = memory[0]
        self.arena: Arena | DeviceArena = Arena(ARENA)
        self.address = 0
        self._closed = False
        super().__init__(partial(Host, self.arena.path), patience=patience, environment=environment)
        if self.memory != "dram":
            try:
                self.address, path = self(hold, *memory, self.arena.path)
                self.arena = DeviceArena(path, self.arena)
            except BaseException:
                self.end()
                raise

    def start(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Begin a call. `result` waits for its end."""
        with _told():
            super().start(called, partial(function, **named), arguments)

    def result(self, patience: float | None = None) -> Any:
        """Wait for the call that `start` began. Returns its result, or raises what it raised."""
        with _told():
            return super().result(patience)

    def end(self) -> None:
        """End the process and free everything. May be called twice."""
        super().end()
        if not self._closed:
            self._closed = True
            self.arena.close()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Say in the kit's words that a worker ended, or does not answer."""
    try:
        yield
    except ProcessError as error:
        if error.status is None:
            raise Hung(str(error), RETURNS) from error
        raise Died(str(error)) from error


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
