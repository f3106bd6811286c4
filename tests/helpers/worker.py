"""What lives in another process of a test: links over shared pools, which calls drive."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.helpers.pools import Component, Memory

import statelink
from statelink.backend import RoomReport, hookimpl
from statelink.registry import load_backend, plugin_manager

if TYPE_CHECKING:
    from pathlib import Path

    from statelink.errors import Reason


def _descriptors() -> int:
    time.sleep(0.002)  # other threads run
    return len(os.listdir("/proc/self/fd"))


@dataclass(frozen=True)
class Seen:
    """A room as it stood at one moment."""

    status: statelink.Status
    reason: Reason | None
    quiesced: bool
    prefix: int | None
    report: RoomReport
    taken_back: bool
    settled: int


@dataclass
class Gate:
    """An event that the test opens, or that raises."""

    open: bool = False
    raises: str = ""
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        if self.raises:
            raise RuntimeError(self.raises)
        return self.open


class Errors(logging.Handler):
    """Keeps what Statelink logs as an error: in no test is there a reason for one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


@dataclass
class Host:
    """What lives in a worker process; its public methods are what a test can call."""

    links: dict[str, statelink.Link] = field(default_factory=dict)
    memories: dict[str, Memory] = field(default_factory=dict)
    rooms: dict[int, statelink.Room] = field(default_factory=dict)
    gates: dict[str, Gate] = field(default_factory=dict)
    errors: Errors = field(default_factory=Errors)
    ends: Counter[tuple[int, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        logging.basicConfig(level=logging.WARNING, format=f"[{os.getpid()}] %(levelname)s %(name)s %(message)s")
        logging.getLogger("statelink").addHandler(self.errors)

    def close(self) -> None:
        for link in self.links.values():
            link.close(1.0)

    def warm(self, backend: str) -> None:
        """Load a backend and its library, so that opening a link does not have to."""
        kind = load_backend(backend)
        kind.probe(kind.Options())

    def open(
        self, key: str, path: Path, pools: Sequence[Component], who: dict[str, Any], config: dict[str, Any]
    ) -> tuple[str, str]:
        memory = Memory(path, pools)
        link = statelink.open(config, memory.inventory(**who))
        self.links[key], self.memories[key] = link, memory
        return link.address, link.name

    def begin(self, number: int, key: str, call: str, *arguments: Any, **named: Any) -> None:
        """Make a room by a method of a link."""
        self.rooms[number] = getattr(self.links[key], call)(*arguments, **self._gated(named))

    def room(self, number: int, call: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of a room."""
        return getattr(self.rooms[number], call)(*arguments, **self._gated(named))

    def link(self, key: str, call: str, *arguments: Any) -> Any:
        """Call a method of a link."""
        return getattr(self.links[key], call)(*arguments)

    def spoiling(self, number: int, call: str, items: Mapping[str, Any], /, **named: Any) -> None:
        arrays = {name: np.array(ids) for name, ids in items.items()}
        self.room(number, call, arrays, **named)
        for array in arrays.values():
            array[:] = -1

    def wait(self, number: int, timeout: float, quiesced: bool) -> Seen:
        self.rooms[number].wait(timeout, quiesced=quiesced)
        return self.see(number)

    def see(self, number: int) -> Seen:
        room = self.rooms[number]
        how = (room.quiesced, room.prefix, room.report, room.taken_back)
        return Seen(room.poll(), room.reason, *how, room.settled if isinstance(room, statelink.Sending) else 0)

    def reach(self, number: int, status: statelink.Status, timeout: float) -> Seen:
        """Wait until a room is at least there, or has failed."""
        until = time.monotonic() + timeout
        room = self.rooms[number]
        while statelink.Status.FAILED < room.status < status and time.monotonic() < until:
            time.sleep(0.001)
        return self.see(number)

    def gate(self, name: str, raises: str) -> None:
        self.gates[name] = Gate(raises=raises)

    def release(self, name: str) -> None:
        self.gates[name].open = True

    def asked(self, name: str) -> int:
        return self.gates[name].asked

    def changes(self, key: str) -> list[tuple[int, statelink.Status, bool]]:
        return [(room.room, room.status, room.quiesced) for room in self.links[key].changes()]

    def close_all(self, timeout: float) -> bool:
        """Close every link, and let go of them and their memory; whether all of them ended."""
        ended = [link.close(timeout) for link in self.links.values()]
        self.links.clear()
        self.memories.clear()
        self.rooms.clear()
        return all(ended)

    def run(self, module: str, function: str, arguments: tuple[Any, ...]) -> Any:
        """Call a function of a module."""
        return getattr(importlib.import_module(module), function)(*arguments)

    def threads(self) -> list[str]:
        """Names of the threads of links and their backends."""
        return [each.name for each in threading.enumerate() if each.name.startswith(("statelink-", "tcp-"))]

    def usage(self) -> dict[str, int]:
        """What this process holds: blocks of Python's memory, resident bytes, descriptors, threads, and all threads.

        The last ones are those of native libraries, too. Resident bytes have what allocators keep. Descriptors are the
        fewest of some looks: the control thread opens a file for a moment to ask whether a process still lives.
        """
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return {
            "blocks": sys.getallocatedblocks(),
            "rss": pages * os.sysconf("SC_PAGE_SIZE"),
            "fds": min(_descriptors() for _ in range(5)),
            "threads": threading.active_count(),
            "tasks": len(os.listdir("/proc/self/task")),
        }

    def count_ends(self) -> None:
        """Count from now on how often each room is reported to have ended."""
        self.ends.clear()
        if not plugin_manager().has_plugin("ends"):
            plugin_manager().register(self, "ends")

    @hookimpl
    def statelink_room_ended(self, report: RoomReport) -> None:
        self.ends[report.room, report.status] += 1

    def counted_ends(self) -> dict[tuple[int, str], int]:
        """Room and status to how often that was reported."""
        return dict(self.ends)

    def take_errors(self) -> list[str]:
        found, self.errors.records = self.errors.records, []
        return found

    def _gated(self, named: dict[str, Any]) -> dict[str, Any]:
        ready = named.get("ready")
        return named if ready is None else {**named, "ready": self.gates[ready]}
