"""An operating system that can tell whether a process of the model has ended."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from statelink.wire import ProcessId

if TYPE_CHECKING:
    from .process import Process

__all__ = ["SimWitness", "witnessed"]

BOOT = "the model"
_numbers = itertools.count(1)
_processes: WeakValueDictionary[int, Process] = WeakValueDictionary()


def witnessed(process: Process) -> ProcessId:
    """An id by which the end of a process can be told."""
    number = next(_numbers)
    _processes[number] = process
    return ProcessId(pid=number, start=1, pid_namespace=1, boot=BOOT)


class SimWitness:
    """What `statelink.link._process.Witness` is on a real host; there is none for a process without an id."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    def of(cls, process: ProcessId | None, address: str | None) -> SimWitness | None:
        found = _processes.get(process.pid) if process is not None and process.boot == BOOT else None
        return cls(found) if found is not None else None

    def ended(self) -> bool:
        return not self._process.alive
