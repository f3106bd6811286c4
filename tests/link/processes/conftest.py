"""Network namespaces for processes to live in."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator

import pytest

__all__ = ["Cable", "cable"]

_numbers = itertools.count()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Cable:
    """Two network namespaces, and a pair of virtual devices between them.

    Nothing of it is in our own: libraries that other tests run there would tell their peers of it, and then miss it.

    Attributes:
        hosts: Of each end, what to put before a command so that it runs there, and its address.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        self._names = [f"sl{os.getpid()}-{number}{end}" for end in "ab"]
        self._devices = [f"sl{os.getpid() % 100000}{end}{number}" for end in "ab"]
        subnet = f"10.{200 + number % 50}.{os.getpid() % 250}"
        addresses = [f"{subnet}.{end}" for end in (1, 2)]
        self.hosts = [(["ip", "netns", "exec", name], at) for name, at in zip(self._names, addresses, strict=True)]
        for name in self._names:
            run("ip", "netns", "add", name)
        (here, there), (device, far) = self._names, self._devices
        run("ip", "-n", here, "link", "add", device, "type", "veth", "peer", "name", far, "netns", there)
        for name, device, address in zip(self._names, self._devices, addresses, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Let nothing through, and tell nobody: packets go to a hardware address that nobody has."""
        for neighbour in self._neighbours("replace"):
            run(*neighbour, "lladdr", "02:00:00:00:00:01", "nud", "permanent")

    def mend(self) -> None:
        """Let everything through again."""
        for neighbour in self._neighbours("del"):
            run(*neighbour)

    def end(self) -> None:
        for name in self._names:
            run("ip", "netns", "del", name)

    def _neighbours(self, change: str) -> Iterator[list[str]]:
        for name, device, (_, other) in zip(self._names, self._devices, self.hosts[::-1], strict=True):
            yield ["ip", "-n", name, "neigh", change, other, "dev", device]


@pytest.fixture
def cable(root: None) -> Iterator[Cable]:
    made = Cable()
    yield made
    made.end()
