"""Ports of this host at which nobody listens, one after the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LISTENING = "0A"
"""The state of a socket that listens, in the system's table."""
_starts = itertools.count(os.getpid() * 67 % 11_000)
"""Each process begins elsewhere, so that tests in several processes do not take each other's ports."""


def consecutive_ports(count: int, host: str = "127.0.0.1") -> range:
    """Ports below those that Linux assigns. They are free when this returns; nothing reserves them."""
    while True:
        first = 20_000 + next(_starts) * count % (12_000 - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(_server(host, port))
            return range(first, first + count)


def taken(ports: range, host: str = "127.0.0.1") -> list[int]:
    """Those at which somebody listens."""
    return [port for port in ports if not _free(host, port)]


def own_ports() -> set[int]:
    """TCP ports at which this process listens, on any address."""
    links = [_link(each) for each in Path("/proc/self/fd").iterdir()]
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    listening = [row for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in links]
    return {int(row[1].rpartition(":")[2], 16) for row in listening}


def _link(path: Path) -> str:
    with contextlib.suppress(OSError):  # what was open while the folder was read
        return str(path.readlink())
    return ""


def _free(host: str, port: int) -> bool:
    try:
        _server(host, port).close()
    except OSError:
        return False
    return True


def _server(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


@contextlib.contextmanager
def listening(ports: range, host: str = "127.0.0.1") -> Iterator[None]:
    """Somebody else listens at these ports."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(_server(host, port))
        yield
