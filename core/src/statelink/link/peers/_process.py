"""Whether the process of a peer has ended, where the operating system of this host can say so."""

from __future__ import annotations

import contextlib
import os
import socket

from statelink.wire import ProcessId, host_of

__all__ = ["Witness", "this_process"]


class Witness:
    """Can say that a process on this host has ended. Thread-safe; never blocks once it is made.

    Args:
        pid: Its id in our pid namespace.
        start: When it started, in ticks since boot; tells it from a later process with its id.
    """

    def __init__(self, pid: int, start: int) -> None:
        self._pid = pid
        self._start = start

    @classmethod
    def of(cls, process: ProcessId | None, address: str | None) -> Witness | None:
        """A witness of the process that was reached at ``address`` a moment ago; ``None`` where there can be none.

        What a peer states is only believed if all of it fits what is seen from here: its address is one of this
        host's own, its kernel was booted when ours was, it is in our pid namespace, and a process with its id and its
        start time is here now. The address matters because machines that were cloned from one snapshot share
        everything else. May block, to look up a host name.

        Args:
            process: What the peer states.
            address: Where it was reached; ``None`` where it reached us, and says that it saw us on its own host.
        """
        ours = this_process()
        if process is None or ours is None or (process.boot, process.pid_namespace) != (ours.boot, ours.pid_namespace):
            return None
        if _look(process.pid)[1] != process.start or not (address is None or _is_here(address)):
            return None
        return cls(process.pid, process.start)

    def ended(self) -> bool:
        """Whether it is certain that none of its threads runs any more, or ever will."""
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it is there, and another user's
        state, start = _look(self._pid)
        if start and start != self._start:
            return True  # its id is another's by now, so that it was reaped
        # A main thread that has ended is a zombie, too, for as long as others run.
        return bool(start) and state in "ZX" and _threads(self._pid) <= 1


def this_process() -> ProcessId | None:
    """Who we are to other processes of this host; ``None`` where that cannot be known."""
    pid = os.getpid()
    try:
        if os.readlink("/proc/self") != str(pid):
            return None  # what is mounted there shows another pid namespace
        space = os.stat("/proc/self/ns/pid").st_ino
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read(64).strip()
    except OSError:
        return None
    start = _look(pid)[1]
    return ProcessId(pid=pid, start=start, pid_namespace=space, boot=boot) if start and boot else None


def _look(pid: int) -> tuple[str, int]:
    """State and start time of a process; an empty state and 0 if they cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Its name comes second, in brackets, and may hold anything.
            fields = file.read(4096).rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 2  # not known: as if there were more


def _is_here(address: str) -> bool:
    """Whether an address is this host's own, in our network namespace: who speaks to one speaks from the same."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, where in socket.getaddrinfo(host_of(address), 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                if probe.getsockname()[0] != where[0]:
                    return False
        return True
    return False
