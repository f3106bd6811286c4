"""Two network namespaces of this machine, which stand for two hosts. Needs root, and ``ip``."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .floor import libc

__all__ = ["SPACES", "Line", "enter", "joined", "missing", "namespaces", "run"]

SPACES = {"prefill": ("statelink-bench-p", "10.88.7.1"), "decode": ("statelink-bench-d", "10.88.7.2")}
"""Role to the name of its namespace and its address there."""
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
MOST_BYTES = 9000
"""Most bytes of a packet on a long line."""


class Line(NamedTuple):
    """A long line between two hosts, the same in both directions.

    Attributes:
        rtt_ms: Round trip of a packet on an empty line.
        lost: How many of 1,000 packets are lost.
        mbit: Megabits in a second.
        queue_ms: For how long packets wait for their turn at most. Those that would wait for longer are dropped.
    """

    rtt_ms: float
    lost: float = 0
    mbit: float = 1000
    queue_ms: float = 100

    def __str__(self) -> str:
        return f"{self.rtt_ms:g} ms" + (f", {self.lost:g} of 1,000 lost" if self.lost else "")


def run(*command: str) -> None:
    """Run a command that has to work."""
    subprocess.run(command, check=True)


def missing() -> str:
    """What a long line would need that is not here; empty for nothing."""
    if os.geteuid():
        return "it needs root, for network namespaces"
    programs = [name for name in ("ip", "cc") if shutil.which(name) is None]
    if programs:
        return f"it needs the programs {' and '.join(programs)}"
    return "" if os.path.exists("/dev/net/tun") else "it needs the kernel's TUN devices (/dev/net/tun)"


@contextlib.contextmanager
def _spaces() -> Iterator[None]:
    """Two network namespaces without a connection. Waits while another process has them."""

    def delete() -> None:
        for name, _ in SPACES.values():
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    with open(os.path.join(tempfile.gettempdir(), "statelink-bench-namespaces"), "w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        delete()  # those of a process that was killed
        try:
            for name, _ in SPACES.values():
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            yield
        finally:
            delete()


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    """Two network namespaces with a pair of interfaces between them."""
    with _spaces():
        (one, here), (two, there) = SPACES.values()
        run("ip", "-n", one, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", two)
        for name, address in ((one, here), (two, there)):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "veth0", "up")
        yield


@contextlib.contextmanager
def joined(line: Line) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two network namespaces with a long line between them.

    Gives the processes that carry the packets, one for each direction. A line whose processes are stopped is silent.
    """
    problem = missing()
    if problem:
        raise SystemExit(f"a long line cannot be made here: {problem}")
    with _spaces(), contextlib.ExitStack() as undo:
        program = os.path.join(undo.enter_context(tempfile.TemporaryDirectory()), "line")
        run("cc", "-O2", "-o", program, str(Path(__file__).with_name("line.c")))
        ends = [_device(role) for role in SPACES]
        for end in ends:
            undo.callback(os.close, end)
        (one, here), (two, there) = SPACES.values()
        for name, address, other in ((one, here, there), (two, there, here)):
            run("ip", "-n", name, "address", "add", address, "peer", other, "dev", "line0")
            run("ip", "-n", name, "link", "set", "line0", "mtu", str(MOST_BYTES), "txqueuelen", "10000", "up")
        told = [str(each) for each in (line.rtt_ms / 2, line.mbit, line.lost, line.queue_ms, MOST_BYTES)]
        carriers = []
        for taken, given in (ends, reversed(ends)):
            command = [program, str(taken), str(given), *told]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=ends)
            os.setpriority(os.PRIO_PROCESS, process.pid, -20)  # a packet is not late because others compute
            undo.callback(process.communicate)  # the end of its input ends it
            carriers.append(process)
        yield carriers


def _device(role: str) -> int:
    """An open TUN device in the namespace of a role. What is read are packets from there."""

    def opened() -> int:
        enter(role)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"line0", IFF_TUN | IFF_NO_PI))
        return end

    with ThreadPoolExecutor(1) as thread:  # the others stay where they are
        return thread.submit(opened).result()


def enter(role: str) -> None:
    """Let this thread, and what it starts from here on, use the network of a role.

    It also sees the devices of that network in ``/sys``, where UCX looks for them.
    """
    with open(f"/run/netns/{SPACES[role][0]}", "rb") as space:
        done = (
            libc.setns(space.fileno(), CLONE_NEWNET) == 0
            and libc.unshare(CLONE_NEWNS) == 0
            and libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None) == 0
            and libc.umount2(b"/sys", MNT_DETACH) == 0
            and libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None) == 0
        )
    if not done:
        raise OSError(f"a namespace cannot be entered: errno {ctypes.get_errno()}")
