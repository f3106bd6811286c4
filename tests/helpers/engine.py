"""A test's handles on worker processes, their links and their rooms."""

from __future__ import annotations

import itertools
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from tests.helpers.pools import Component, Memory
from tests.helpers.worker import Host

import statelink
from statelink import Status
from statelink.testing.process import Process

if TYPE_CHECKING:
    from tests.helpers.worker import Seen

    from statelink.errors import Reason

PLUGINS = Path(__file__).parent / "plugins"
Items = Mapping[str, Any]


class Engine(Process[Host]):
    """One operating-system process with links in it. What it prints goes where the tests print.

    Args:
        folder: Where pools lie.
        name: For messages, and for the files of its pools.
        inside: A command that runs the one that follows it in another place, such as a network namespace.
        environment: Changes to this process's environment.
    """

    def __init__(
        self, folder: Path, name: str, inside: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.links: list[LinkHandle] = []
        self._numbers = itertools.count()
        given = environment or {}
        path = os.pathsep.join(filter(None, [given.get("PYTHONPATH"), *sys.path, str(PLUGINS)]))
        super().__init__(Host, name=name, environment={**given, "PYTHONPATH": path}, through=inside, output=2)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def run(self, module: str, function: str, *arguments: Any) -> Any:
        """Call a function of a module that this process need not have, without the worker's host."""
        return self(Host.run, module, function, arguments)

    def open(self, role: str, backend: str, pools: Sequence[Component], **config: Any) -> LinkHandle:
        """Open a link over pools of its own, in a file of its own, filled with random bytes.

        Of ``config``, ``instance``, ``rank``, ``ranks`` and ``model`` describe the inventory.
        """
        return self.begin_open(role, backend, pools, **config)()

    def begin_open(
        self, role: str, backend: str, pools: Sequence[Component], **config: Any
    ) -> Callable[[], LinkHandle]:
        """The first half of that; what is returned is the second."""
        key = str(next(self._numbers))
        path = self.folder / f"{self.name}-{key}"
        memory = Memory(path, pools)
        memory.fill(zlib.crc32(path.name.encode()))
        usual = {"instance": role, "rank": 0, "ranks": 1, "model": ""}
        who = {name: config.pop(name, value) for name, value in usual.items()}
        self.start(Host.open, key, path, tuple(pools), who, {"role": role, "backend": backend, **config})

        def opened() -> LinkHandle:
            address, name = self.result()
            self.links.append(LinkHandle(self, key, address, name, memory))
            return self.links[-1]

        return opened

    def gate(self, name: str, raises: str = "") -> str:
        """Make a closed gate, or one that raises; its name goes where an engine passes its event."""
        self(Host.gate, name, raises)
        return name

    def release(self, name: str) -> None:
        """Open a gate."""
        self(Host.release, name)


class LinkHandle:
    """A link in a worker.

    Attributes:
        memory: Its pools, mapped here.
    """

    def __init__(self, engine: Engine, key: str, address: str, name: str, memory: Memory) -> None:
        self.engine = engine
        self.key = key
        self.address = address
        self.name = name
        self.memory = memory

    def send(self, *arguments: Any, **named: Any) -> RoomHandle:
        return self._begin("send", *arguments, **named)

    def receive(self, *arguments: Any, **named: Any) -> RoomHandle:
        return self._begin("receive", *arguments, **named)

    def _begin(self, *arguments: Any, **named: Any) -> RoomHandle:
        number = next(_rooms)
        self.engine(Host.begin, number, self.key, *arguments, **named)
        return RoomHandle(self.engine, number)

    def snapshot(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.engine(Host.link, self.key, "snapshot"))

    def suspend(self, timeout: float = 20.0) -> None:
        self.engine(Host.link, self.key, "suspend", timeout)

    def resume(self) -> None:
        self.engine(Host.link, self.key, "resume")

    def siblings(self, addresses: Sequence[str]) -> None:
        self.engine(Host.link, self.key, "siblings", addresses)

    def changes(self) -> list[tuple[int, Status, bool]]:
        return self.engine(Host.changes, self.key)

    def close(self, timeout: float = 5.0) -> bool:
        """Close it; what it returned."""
        ended = bool(self.engine(Host.link, self.key, "close", timeout))
        if self in self.engine.links:
            self.engine.links.remove(self)
        return ended


_rooms = itertools.count(1)


class RoomHandle:
    """A room of a link in a worker, with the methods of a room."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._number = number

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._engine, Host.room, self._number, name)

    def spoiling(self, call: str, items: Items, **named: Any) -> None:
        """`push` or `accept` with arrays that are overwritten once the call has returned."""
        self._engine(Host.spoiling, self._number, call, items, **named)

    def see(self) -> Seen:
        return self._engine(Host.see, self._number)

    def wait(self, timeout: float = 20.0, *, quiesced: bool = False) -> Seen:
        return self._engine(Host.wait, self._number, timeout, quiesced)

    def reach(self, status: Status, timeout: float = 20.0) -> Seen:
        return self._engine(Host.reach, self._number, status, timeout)

    def succeeded(self, timeout: float = 20.0) -> Seen:
        """Wait for the end, which is a success."""
        seen = self.wait(timeout, quiesced=True)
        assert seen.status is statelink.Status.SUCCEEDED, f"{seen.status!r}: {seen.reason}"
        assert seen.reason is None
        assert seen.quiesced
        return seen

    def failed(self, timeout: float = 20.0) -> str:
        """Wait for the end, which is a failure: its reason, as text, without how the room stood."""
        return str(msgspec.structs.replace(self.why(timeout), diagnostics={}))

    def why(self, timeout: float = 20.0) -> Reason:
        """Wait for the end, which is a failure: all of its reason."""
        seen = self.wait(timeout)
        assert seen.status is statelink.Status.FAILED, seen
        assert seen.reason is not None
        return seen.reason
