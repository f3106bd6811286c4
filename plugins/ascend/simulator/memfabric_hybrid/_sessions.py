"""Sessions: who listens where, what memory they published, and who of them is alive.

The library's stores speak with each other in native threads. Here, each engine keeps one file under the name of its
session, so that nothing has to run in a process for others to learn of it. An address belongs to whoever has it bound,
and a file to the process that it names, as long as that lives.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from ._settings import bind_seconds, ports, publish_seconds

__all__ = ["Record", "Session", "address_of", "find"]

TRIES = 64


class Record(NamedTuple):
    """What others can see of a session.

    Attributes:
        pid: Its process.
        started: When that started, in ticks of the kernel: process ids are used again.
        server: Whether it is a store that others connect to.
        ranges: First and last address, when it was published, and when it was taken back, if it was.
        connected: Sessions that it connected to, and when.
    """

    pid: int
    started: int
    server: bool
    ranges: list[tuple[int, int, float, float | None]]
    connected: dict[str, float]

    @property
    def state(self) -> str:
        """``alive``, ``stopped`` or ``dead``."""
        state, started = _look(self.pid)
        if started != self.started or state in "ZX":
            return "dead"
        return "stopped" if state in "Tt" else "alive"

    def visible(self, since: float) -> list[tuple[int, int]]:
        """Ranges that one who connected at ``since`` knows by now. Taking one back tells nobody who knew it."""
        now = time.monotonic()
        return [
            (begin, end)
            for begin, end, published, taken in self.ranges
            if (taken is None or taken > since) and (published <= since or published + publish_seconds() <= now)
        ]


class Session:
    """The session of an engine of this process: a bound address, and a file that others read."""

    def __init__(self, host: str, port: int, server: bool) -> None:
        """Bind it.

        Raises:
            OSError: It cannot be bound; takes a while.
        """
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.name = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()
        self._record = Record(os.getpid(), _look(os.getpid())[1], server, [], {})
        _sweep()
        self._write()

    def publish(self, ranges: list[tuple[int, int]]) -> None:
        """Let others know of memory: at once if they come later, after a while if they are connected."""
        now = time.monotonic()
        self._record.ranges.extend((begin, end, now, None) for begin, end in ranges)
        self._write()

    def withdraw(self, address: int) -> None:
        """Tell nobody else of a range."""
        now = time.monotonic()
        self._record.ranges[:] = [
            (begin, end, published, now if taken is None and begin <= address < end else taken)
            for begin, end, published, taken in self._record.ranges
        ]
        self._write()

    def joined(self, other: str) -> None:
        """Let ``other`` know that we connected to it."""
        self._record.connected.setdefault(other, time.monotonic())
        self._write()

    def close(self) -> None:
        """Give the address back."""
        with contextlib.suppress(OSError):
            _file(self.name).unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes who accepts
        self._socket.close()

    def _accept(self) -> None:
        """Take connections, and close them: they speak no language of the store."""
        with contextlib.suppress(OSError):  # when it is closed
            while True:
                self._socket.accept()[0].close()

    def _write(self) -> None:
        path = _file(self.name)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(self._record))
        fresh.replace(path)


def find(name: str) -> Record | None:
    """What is known of a session, dead ones included."""
    try:
        return _read(json.loads(_file(name).read_text()))
    except OSError:
        return None


def address_of(name: str) -> tuple[str, int] | None:
    """Host and port of ``ip``, ``ip:port``, ``[v6]`` or ``[v6]:port``; the port is 0 where there is none."""
    host, port = name, "0"
    if name.startswith("["):
        host, _, rest = name[1:].partition("]")
        port = rest[1:] or "0"
    elif ":" in name:
        host, _, port = name.rpartition(":")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    return (host, int(port)) if port.isdigit() and int(port) < 1 << 16 else None


def _bind(host: str, port: int) -> socket.socket:
    range_ = ports()
    for _ in range(TRIES):
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            bound.bind((host, port or random.choice(range_)))
            bound.listen()
        except OSError:
            bound.close()
            time.sleep(bind_seconds() / TRIES)
        else:
            return bound
    raise OSError(f"{host}:{port} cannot be bound")


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"memfabric-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _file(name: str) -> Path:
    return _folder() / f"{name.replace(':', '_')}.json"


def _read(found: Any) -> Record:
    pid, started, server, ranges, connected = found
    return Record(pid, started, server, [tuple(each) for each in ranges], connected)


def _sweep() -> None:
    """Remove what the dead left."""
    for path in _folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            if _read(json.loads(path.read_text())).state == "dead":
                path.unlink()


def _look(pid: int) -> tuple[str, int]:
    """State and start of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])
