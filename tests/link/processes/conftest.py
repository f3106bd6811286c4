"""Network namespaces for processes to live in."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator

import pytest

_numbers = itertools.count()


def ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {command}: {done.stderr}"


class Cable:
    """Two network namespaces, and a pair of virtual devices between them, which have the namespaces' names.

    Nothing of it is in our own: libraries that other tests run there would tell their peers of it, and then miss it.
    ``hosts`` are, of each end, what to put before a command so that it runs there, and its address.
    """

    def __init__(self) -> None:
        number, process = next(_numbers), os.getpid()
        subnet = f"10.{200 + number % 50}.{process % 250}"
        self._ends = [(f"sl{process}-{number}{end}", f"{subnet}.{at}") for at, end in enumerate("ab", 1)]
        self.hosts = [(["ip", "netns", "exec", name], address) for name, address in self._ends]
        (here, _), (there, _) = self._ends
        for name in (here, there):
            ip(f"netns add {name}")
        ip(f"-n {here} link add {here} type veth peer name {there} netns {there}")
        for name, address in self._ends:
            ip(f"-n {name} address add {address}/24 dev {name}")
            ip(f"-n {name} link set {name} up")
            ip(f"-n {name} link set lo up")

    def cut(self) -> None:
        """Let nothing through, and tell nobody: packets go to a hardware address that nobody has."""
        self._neighbours("replace", "lladdr 02:00:00:00:00:01 nud permanent")

    def mend(self) -> None:
        """Let everything through again."""
        self._neighbours("del")

    def _neighbours(self, change: str, how: str = "") -> None:
        for (name, _), (_, other) in zip(self._ends, self._ends[::-1], strict=True):
            ip(f"-n {name} neigh {change} {other} {how} dev {name}")


@pytest.fixture
def cable(root: None) -> Iterator[Cable]:
    made = Cable()
    yield made
    for command, _ in made.hosts:
        ip(f"netns del {command[-1]}")
