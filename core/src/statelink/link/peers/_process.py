"""Whether the process of a peer has ended, where the operating system of this host can say so."""

from __future__ import annotations

import contextlib
import os
import socket

from statelink.backend import boot_id
from statelink.wire import ProcessId, host_of

__all__ = ["Witness", "this_process"]


class Witness:
    """Can tell whether one process on this host has ended. Thread-safe; only `of` may block.

    Args:
        pid: The process's id in our pid namespace.
        start: When the process started, in ticks since boot: another process may get the same id later.
    """

    def __init__(self, pid: int, start: int) -> None:
        self._pid = pid
        self._start = start

    @classmethod
    def of(cls, process: ProcessId | None, address: str | None) -> Witness | None:
        """A witness of a peer's process; ``None`` unless that process is visible from here.

        What the peer states must fit what this process sees: the peer's address is one of this host's own, its boot id
        and its pid namespace are ours, and a process with its id and its start time runs here. The address matters
        because machines that were cloned from one snapshot share everything else. May block, to look up a host name.

        Args:
            process: What the peer states.
            address: Where this link dialled the peer a moment ago. ``None`` if the peer dialled this link, and stated
                that the two are on one host.
        """
        ours = this_process()
        if process is None or ours is None or (process.boot, process.pid_namespace) != (ours.boot, ours.pid_namespace):
            return None
        if _look(process.pid)[1] != process.start or not (address is None or _is_here(address)):
            return None
        return cls(process.pid, process.start)

    def ended(self) -> bool:
        """Whether it is certain that no thread of the process runs any more, or ever will."""
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it runs, as another user
        state, start = _look(self._pid)
        if start and start != self._start:
            return True  # another process has its id, so it was reaped
        # A process whose main thread has ended looks like a zombie, too, while its other threads run.
        return bool(start) and state in "ZX" and _threads(self._pid) <= 1


def this_process() -> ProcessId | None:
    """What identifies this process to others on this host; ``None`` where that cannot be known."""
    pid = os.getpid()
    try:
        if os.readlink("/proc/self") != str(pid):
            return None  # the mounted /proc shows another pid namespace
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    start, boot = _look(pid)[1], boot_id()
    return ProcessId(pid=pid, start=start, pid_namespace=space, boot=boot) if start and boot else None


def _look(pid: int) -> tuple[str, int]:
    """State and start time of a process; an empty state and 0 if they cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The program's name comes second, in brackets, and may hold any characters.
            fields = file.read(4096).rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 2  # not known: assume that other threads run


def _is_here(address: str) -> bool:
    """Whether an address is one of this host's own, in our network namespace.

    A socket that is connected to an address of its own host has that address itself, too.
    """
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, where in socket.getaddrinfo(host_of(address), 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                if probe.getsockname()[0] != where[0]:
                    return False
        return True
    return False
