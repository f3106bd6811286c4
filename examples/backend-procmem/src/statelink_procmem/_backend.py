"""The backend: the kernel copies from one process of a host to another."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

import statelink.backend as sdk

__all__ = ["Options", "ProcmemBackend"]

MOST = 1024  # blocks that the kernel takes in one call
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_writev.restype = ctypes.c_ssize_t
libc.process_vm_writev.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """This backend has no options."""


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer needs to reach a process, and to be sure that it is this one."""

    host: str
    pid: int
    started: str
    mark: tuple[int, int]  # an open file, and what it is: both as long as the backend is open


def host() -> str:
    """Names this boot of this machine, and the namespace that gives pids their meaning."""
    return sdk.boot_id() + os.readlink("/proc/self/ns/pid")


def started(pid: int) -> str:
    """When a process started; empty if there is none, or only what is left of one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_open(pid: int, mark: tuple[int, int]) -> bool:
    """Whether a process still has the file that marks its backend."""
    try:
        return os.stat(f"/proc/{pid}/fd/{mark[0]}").st_ino == mark[1]
    except OSError:
        return False


def write(pid: int, here: Any, there: Any, nbytes: Any) -> str:
    """Write blocks into a process, and say what went wrong, if anything did. No byte moves after it has returned."""
    for first in range(0, len(nbytes), MOST):
        part = slice(first, first + MOST)
        near, far = (np.column_stack((end[part], nbytes[part])) for end in (here, there))  # rows of `struct iovec`
        done = libc.process_vm_writev(pid, near.ctypes.data, len(near), far.ctypes.data, len(far), 0)
        if done != int(nbytes[part].sum()):
            return os.strerror(ctypes.get_errno()) if done < 0 else f"the kernel wrote {done} bytes, and not all"
    return ""


class ProcmemBackend(sdk.CopyingBackend[Process]):
    """Writes into the memory of another process of this host. It needs permission to trace that process."""

    api_version = 1
    name = "procmem"
    Options = Options
    Place = Process
    capabilities = sdk.Capabilities(
        memory_kinds=frozenset({"dram"}),
        submit_mode=sdk.SubmitMode.BLOCKING,  # `copy` returns when the bytes are there
        stalled_peers=None,  # the kernel does not wait for the other process
        thread_safe=True,
        source=sdk.Fence.MOVER,
        target=sdk.Fence.MOVER,
    )
    strategies = MappingProxyType({"*": sdk.DIRECT})

    def __init__(self, context: sdk.BackendContext) -> None:
        super().__init__(context)
        self._mark = os.memfd_create("procmem")  # the kernel would also write to a backend that was closed

    @classmethod
    def probe(cls, options: Any) -> sdk.Probe:
        """Write a byte of this process over itself."""
        byte, one = np.zeros(1, np.uint8), np.ones(1, np.uint64)
        wrong = write(os.getpid(), one * byte.ctypes.data, one * byte.ctypes.data, one)
        hint = "allow process_vm_writev in the seccomp profile" if wrong else ""
        return sdk.Probe(ok=not wrong, reason=wrong or "the kernel copies between processes", hint=hint)

    def here(self) -> Process:
        """This process. Peers of this user may write into it from now on."""
        libc.prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)  # PR_SET_PTRACER_ANY
        return Process(host(), os.getpid(), started(os.getpid()), (self._mark, os.fstat(self._mark).st_ino))

    def problem(self, there: Process) -> str:
        """Whether the peer's process is here, and runs, with an open backend."""
        if there.host != host():
            return "it is on another host, or in another pid namespace"
        if not there.started or there.started != started(there.pid):
            return "its process has ended"
        return "" if is_open(there.pid, there.mark) else "it was closed"

    def copy(self, there: Process, ends: sdk.Ends) -> str:
        """Write all blocks."""
        return write(there.pid, ends.here, ends.there, ends.nbytes)

    def close(self) -> None:
        """Forget all peers, and be known as closed. May be called twice."""
        super().close()
        mark, self._mark = self._mark, -1
        if mark >= 0:
            os.close(mark)
