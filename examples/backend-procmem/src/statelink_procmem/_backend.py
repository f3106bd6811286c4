"""The backend: the kernel copies from one process of a host to another."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import numpy as np

from statelink.backend import (
    DIRECT,
    Backend,
    BackendContext,
    Batch,
    Capabilities,
    Ends,
    Fence,
    Op,
    Outcome,
    Probe,
    Region,
    RegionTable,
    Side,
    Strategy,
    SubmitMode,
    Transfer,
)
from statelink.errors import TransferError

__all__ = ["Options", "ProcmemBackend"]

MOST = 1024  # blocks that the kernel takes in one call
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_writev.restype = ctypes.c_ssize_t


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """This backend has no options."""


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer needs to reach this process, and to be sure that it is this one."""

    link: str
    host: str
    pid: int
    started: str


def host() -> str:
    """Names this boot of this machine, and the namespace that gives pids their meaning."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def started(pid: int) -> str:
    """When a process started; empty if there is none, or only what is left of one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def copy(pid: int, ends: Ends) -> str:
    """Write blocks into a process, and say what went wrong, if anything did. No byte moves after it has returned."""
    here = np.column_stack((ends.here, ends.nbytes))  # two numbers of 64 bits for each block: a `struct iovec`
    there = np.column_stack((ends.there, ends.nbytes))
    for first in range(0, len(here), MOST):
        mine, its = here[first : first + MOST], there[first : first + MOST]
        near, far = ctypes.c_void_p(mine.ctypes.data), ctypes.c_void_p(its.ctypes.data)
        count = ctypes.c_ulong(len(mine))
        done = libc.process_vm_writev(pid, near, count, far, count, ctypes.c_ulong(0))
        if done != int(mine[:, 1].sum()):
            return os.strerror(ctypes.get_errno()) if done < 0 else f"the kernel wrote {done} bytes, and not all"
    return ""


class ProcmemBackend(Backend):
    """Writes into the memory of another process of this host. It needs permission to trace that process."""

    api_version = 1
    name = "procmem"
    Options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"dram"}),
        ops=frozenset({Op.WRITE}),
        submit_mode=SubmitMode.BLOCKING,  # `submit` returns when the bytes are there
        stalled_peers=None,  # the kernel does not wait for the other process
        thread_safe=True,
        fences=MappingProxyType({(Op.WRITE, Side.SOURCE): Fence.MOVER, (Op.WRITE, Side.TARGET): Fence.MOVER}),
    )
    strategies: ClassVar[Mapping[str, Strategy]] = MappingProxyType({"*": DIRECT})

    def __init__(self, context: BackendContext) -> None:
        self._own = Descriptor(context.link, host(), os.getpid(), started(os.getpid()))
        self._regions = RegionTable((), self.name)
        self._peers: dict[str, tuple[Descriptor, RegionTable]] = {}
        self._lock = threading.Lock()
        self._closed = False
        libc.prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)  # PR_SET_PTRACER_ANY: peers of this user may write

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Write a byte into this process."""
        place, value = np.zeros(2, np.uint8), np.ones(1, np.uint64)
        address = np.array([place.ctypes.data], np.uint64)
        none = np.zeros(1, np.uint32)
        wrong = copy(os.getpid(), Ends(address, none, address + value, none, value))
        hint = "allow process_vm_writev in the seccomp profile" if wrong else ""
        return Probe(ok=not wrong, reason=wrong or "the kernel copies between processes", hint=hint)

    def register(self, regions: Sequence[Region]) -> None:
        """Remember the regions: the kernel needs no registration."""
        for region in regions:
            if region.kind != "dram":
                raise TransferError(f"memory of kind {region.kind!r} cannot be registered", backend=self.name)
        self._regions = RegionTable(regions, self.name)

    def descriptor(self) -> bytes:
        """Who this process is."""
        return msgspec.json.encode(self._own)

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Check that the peer's process is here, and runs."""
        cause = ""
        try:
            theirs = msgspec.json.decode(descriptor, type=Descriptor)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError("no such descriptor", cause=str(error), backend=self.name, peer=peer) from error
        if theirs.link != peer:
            cause = f"its descriptor is that of {theirs.link!r}"
        elif theirs.host != self._own.host:
            cause = "it is on another host, or in another pid namespace"
        elif theirs.started != started(theirs.pid):
            cause = "its process has ended"
        with self._lock:
            if self._closed:
                cause = "this backend is closed"
            elif not cause:
                self._peers[peer] = (theirs, RegionTable(regions, self.name))
        if cause:
            raise TransferError("a peer cannot be connected", cause=cause, backend=self.name, peer=peer)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Check every block, then copy all of them."""
        known = self._peers.get(peer)
        if known is None or batch.op is not Op.WRITE:
            cause = "it is not connected" if known is None else f"{batch.op} is not declared"
            raise TransferError("a batch cannot be moved", cause=cause, backend=self.name, peer=peer)
        theirs, table = known
        ends = Ends.of(batch, self._regions, table)
        if theirs.started != started(theirs.pid):
            return Transfer(Outcome(False, "the peer's process has ended", settled=True))
        wrong = copy(theirs.pid, ends)
        return Transfer(Outcome(not wrong, wrong, settled=True))

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Do nothing: a transfer has ended when `submit` returns."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not."""
        with self._lock:
            self._peers.pop(peer, None)

    def close(self) -> None:
        """Forget everybody. May be called twice."""
        with self._lock:
            self._closed = True
            self._peers.clear()
