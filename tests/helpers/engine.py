"""A test's handles on worker processes, their links and their rooms."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from tests.helpers.pools import Component, Memory

import statelink
from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.worker import Seen

    from statelink.errors import Reason

ROOT = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent / "plugins"
PATIENCE = 60.0
"""Seconds after which a worker counts as stuck. Nothing here takes that long on a machine that works."""
Items = Mapping[str, Any]


class Engine:
    """One operating-system process with links in it.

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
        self.name = name
        self.links: list[LinkHandle] = []
        self._numbers = itertools.count()
        self._asked = ""
        ours, theirs = socket.socketpair()
        given = {**os.environ, **(environment or {})}
        path = os.pathsep.join(filter(None, [given.get("PYTHONPATH"), str(ROOT), str(PLUGINS)]))
        with ours, theirs:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "tests.helpers.worker", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=(theirs.fileno(),),
                env={**given, "PYTHONPATH": path},
            )
            self._pipe = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the worker's host; what it raises is raised here."""
        self.ask(method, *arguments, **named)
        return self.answer()

    def ask(self, method: str, *arguments: Any, **named: Any) -> None:
        """The first half of a call, for things that take their time in several processes."""
        self._asked = f"{method}{arguments!r:.300}"
        self._pipe.send((method, arguments, named))

    def answer(self, patience: float = PATIENCE) -> Any:
        """The second half of a call; without an answer for so many seconds, the worker counts as stuck.

        The seconds are counted one by one: if the machine stands still for a minute, that counts as one second.
        """
        if not any(self._pipe.poll(1.0) for _ in range(int(patience))):
            self.process.send_signal(signal.SIGABRT)  # its fault handler prints every stack
            raise AssertionError(f"{self.name} (pid {self.pid}) did not answer {self._asked}")
        try:
            good, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise EOFError(f"{self.name} ended in {self._asked}: exit status {self.process.wait(PATIENCE)}") from error
        if not good:
            raise answer
        return answer

    def run(self, module: str, function: str, *arguments: Any) -> Any:
        """Call a function of a module of the tests in the worker."""
        return self.call("run", module, function, arguments)

    def run_here(self, module: str, function: str, *arguments: Any) -> Any:
        """The same with a function that takes the worker's host, and so its links, before its own arguments."""
        return self.call("run_here", module, function, arguments)

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
        self.ask("open", key, path, tuple(pools), who, {"role": role, "backend": backend, **config})

        def opened() -> LinkHandle:
            address, name = self.answer()
            self.links.append(LinkHandle(self, key, address, name, memory))
            return self.links[-1]

        return opened

    def gate(self, name: str, raises: str = "") -> str:
        """Make a closed gate, or one that raises; its name goes where an engine passes its event."""
        self.call("gate", name, raises)
        return name

    def release(self, name: str) -> None:
        """Open a gate."""
        self.call("release", name)

    def stop(self) -> None:
        """Stop every thread of it. Returns when they stand still: until then, a stopped process may still do a lot."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """Let it run again."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.wait(PATIENCE)
        self._pipe.close()

    def dismiss(self) -> None:
        """Let it close its links and end, however it stands; does not wait for it."""
        if not self._pipe.closed:
            self._pipe.close()
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Dismiss it, and wait until it is gone."""
        self.dismiss()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(PATIENCE)
            raise AssertionError(f"{self.name} did not end by itself") from None


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
        self.engine.call("begin", number, self.key, *arguments, **named)
        return RoomHandle(self.engine, number)

    def snapshot(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.engine.call("link", self.key, "snapshot"))

    def suspend(self, timeout: float = 20.0) -> None:
        self.engine.call("link", self.key, "suspend", timeout)

    def resume(self) -> None:
        self.engine.call("link", self.key, "resume")

    def siblings(self, addresses: Sequence[str]) -> None:
        self.engine.call("link", self.key, "siblings", addresses)

    def changes(self) -> list[tuple[int, Status, bool]]:
        return cast("list[tuple[int, Status, bool]]", self.engine.call("changes", self.key))

    def close(self, timeout: float = 5.0) -> bool:
        """Close it; what it returned."""
        ended = bool(self.engine.call("link", self.key, "close", timeout))
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
        return partial(self._engine.call, "room", self._number, name)

    def spoiling(self, call: str, items: Items, **named: Any) -> None:
        """`push` or `accept` with arrays that are overwritten once the call has returned."""
        self._engine.call("spoiling", self._number, call, items, **named)

    def see(self) -> Seen:
        return cast("Seen", self._engine.call("see", self._number))

    def wait(self, timeout: float = 20.0, *, quiesced: bool = False) -> Seen:
        return cast("Seen", self._engine.call("wait", self._number, timeout, quiesced))

    def reach(self, status: Status, timeout: float = 20.0) -> Seen:
        return cast("Seen", self._engine.call("reach", self._number, status, timeout))

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
