"""Two network namespaces of this machine, which stand for two hosts. Needs root, and ``ip``."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator

from .floor import libc

__all__ = ["SPACES", "enter", "namespaces", "run"]

SPACES = {"prefill": ("statelink-bench-p", "10.88.7.1"), "decode": ("statelink-bench-d", "10.88.7.2")}
"""Role to the name of its namespace and its address there."""
CLONE_NEWNET = 0x40000000


def run(*command: str) -> None:
    """Run a command that has to work."""
    subprocess.run(command, check=True)


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    """Two network namespaces with a pair of interfaces between them."""
    try:
        for name, _ in SPACES.values():
            run("ip", "netns", "add", name)
        (one, here), (two, there) = SPACES.values()
        run("ip", "-n", one, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", two)
        for name, address in ((one, here), (two, there)):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "veth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name, _ in SPACES.values():
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def enter(role: str) -> None:
    """Let this thread, and what it starts from here on, use the network of a role."""
    with open(f"/run/netns/{SPACES[role][0]}", "rb") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(f"a namespace cannot be entered: errno {ctypes.get_errno()}")
