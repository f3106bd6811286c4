"""The links' own fixtures, and other places in the system for processes to live in."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator

import pytest
from tests.link.conftest import _workshops, workshop

__all__ = ["Cable", "_workshops", "cable", "root", "workshop"]

_numbers = itertools.count()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@pytest.fixture(scope="session")
def root() -> None:
    """Namespaces can be made here."""
    if os.geteuid():
        pytest.skip("making namespaces needs root")
    made = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"namespaces cannot be made here: {made.stderr.strip()}")


class Cable:
    """A network namespace, and a pair of virtual devices that leads there.

    Attributes:
        here: Our address.
        there: The address in the namespace.
        enter: What to put before a command so that it runs in the namespace.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        self._name = f"sl{os.getpid()}-{number}"
        self._device = f"sl{os.getpid() % 100000}a{number}"
        subnet = f"10.{200 + number % 50}.{os.getpid() % 250}"
        self.here, self.there = f"{subnet}.1", f"{subnet}.2"
        self.enter = ["ip", "netns", "exec", self._name]
        self._far = far = f"{self._device}b"
        run("ip", "netns", "add", self._name)
        run("ip", "link", "add", self._device, "type", "veth", "peer", "name", far, "netns", self._name)
        run("ip", "address", "add", f"{self.here}/24", "dev", self._device)
        run("ip", "-n", self._name, "address", "add", f"{self.there}/24", "dev", far)
        run("ip", "link", "set", self._device, "up")
        run("ip", "-n", self._name, "link", "set", far, "up")
        run("ip", "-n", self._name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Let nothing through, and tell nobody: packets go to a hardware address that nobody has."""
        nowhere = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"]
        run("ip", "neigh", "replace", self.there, *nowhere, "dev", self._device)
        run("ip", "-n", self._name, "neigh", "replace", self.here, *nowhere, "dev", self._far)

    def mend(self) -> None:
        """Let everything through again."""
        run("ip", "neigh", "del", self.there, "dev", self._device)
        run("ip", "-n", self._name, "neigh", "del", self.here, "dev", self._far)

    def end(self) -> None:
        run("ip", "netns", "del", self._name)


@pytest.fixture
def cable(root: None) -> Iterator[Cable]:
    made = Cable()
    yield made
    made.end()
