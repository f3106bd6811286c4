"""Checks of the machine and of memory, and trials in a process of their own, for plugins over native libraries."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from statelink.backend._capabilities import Check, Verdict
from statelink.backend._machine import on_machine, seen_in
from statelink.errors import TransferError
from statelink.pointers import lockable, on_disk, pinned, read_map

from ._errors import unregistered

if TYPE_CHECKING:
    from statelink.state import Region

__all__ = [
    "Ended",
    "check_pinnable",
    "elsewhere",
    "environment",
    "lacking",
    "loads",
    "needs",
    "on_machine",
    "rdma_devices",
    "seen_in",
    "settings",
]


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        status: Its exit status, or a signal's number below 0; ``None`` where it did not end in time.
        how: The status in words.
        output: Text that it wrote to standard output.
        errors: Text that it wrote to standard error.
    """

    status: int | None
    how: str
    output: str = ""
    errors: str = ""

    @property
    def last(self) -> str:
        """The last line that it wrote: to standard error, or else to standard output."""
        lines = [line.strip() for line in (self.output + "\n" + self.errors).splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def elsewhere(code: str, *arguments: str, patience: float = 60.0) -> Ended:
    """Run Python code in a process of its own, because a library may end that process.

    The process finds the same packages as this one, and has ``arguments`` in ``sys.argv[1:]``. Blocks until it has
    ended or was killed after ``patience`` seconds. Safe from any thread.
    """
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=patience,
            env={**os.environ, **path},
        )
    except subprocess.TimeoutExpired:
        return Ended(None, f"it did not end within {patience:g} s")
    status = done.returncode
    how = f"exit status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):  # most real-time signals have no name
            how = f"signal {-status}"
            how = signal.Signals(-status).name
    return Ended(status, how, done.stdout, done.stderr)


def lacking(library: object, needed: Mapping[str, str]) -> list[str]:
    """The names that this version of a library lacks, as ``Class.method``.

    Args:
        library: The imported module.
        needed: Class name to the names of its methods that are needed, separated by blanks.
    """
    names = ((kind, name) for kind, members in needed.items() for name in members.split())
    return [f"{kind}.{name}" for kind, name in names if not hasattr(getattr(library, kind, None), name)]


def loads(library: str) -> bool:
    """Whether the loader can load a shared library, by name or path. Tries it in a process of its own, and blocks."""
    if on_machine("/") != Path("/"):
        return on_machine(f"/lib/{Path(library).name}").exists()
    return elsewhere("import ctypes, sys; ctypes.CDLL(sys.argv[1])", library).status == 0


def needs(lacks: Iterable[str], found: str) -> Iterator[Check]:
    """A check for each thing that the machine lacks, or one check with what was found if it lacks nothing."""
    lack = None
    for lack in lacks:
        yield Check(what="needs", verdict=Verdict.PROBLEM, found=lack)
    if lack is None:
        yield Check(what="needs", verdict=Verdict.OK, found=found)


def settings(*prefixes: str) -> Check:
    """A check that lists the environment variables that begin with one of these prefixes."""
    seen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]
    found = ", ".join(seen) or f"no {' or '.join(f'{each}*' for each in prefixes)} is set"
    return Check(what="environment", verdict=Verdict.OK, found=found)


def rdma_devices() -> dict[str, list[str]]:
    """RDMA devices of this host in any state, and for each the numbers of its active ports."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for device in sorted(on_machine("/sys/class/infiniband").iterdir()):
            ports = sorted(device.glob("ports/*"))
            found[device.name] = [port.name for port in ports if _text(port / "state").endswith("ACTIVE")]
    return found


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, for a library that reads them when one of its objects is made.

    All threads share the environment, so the caller holds a lock that keeps others from doing the same.
    """
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def check_pinnable(regions: Sequence[Region], *, backend: str, library: str | None = None) -> None:
    """Refuse host memory that Linux does not pin for a network card that writes to it.

    Reads the process's memory map once, and its limit on locked memory. It does not ask drivers about device memory.
    Memory that passes may still be refused by the card. Never blocks. Safe from any thread.

    Args:
        regions: The regions that are to be registered.
        backend: Name of the backend, for the error.
        library: Name and version of its library, for the error.

    Raises:
        TransferError: A part of a region is not mapped for reading and writing, or is mapped from a file on a disk. Or
            all regions, together with what is pinned, are more than this process may lock.
    """
    host = {number: each for number, each in enumerate(regions) if each.kind == "dram"}
    map_, most = read_map(), lockable()
    if not host or map_ is None:
        return
    first = np.array([each.address for each in host.values()], np.uint64)
    for (number, region), reached in zip(host.items(), map_.reach(first, "rw").tolist(), strict=True):
        if reached < region.address + region.nbytes:
            there = map_.at(reached) or "nothing is mapped there"
            cause = f"byte {reached - region.address} of it is not mapped for reading and writing: {there}"
            raise unregistered(number, region, cause, backend=backend, library=library)
        files = [str(each) for each in map_.over(region.address, region.nbytes) if on_disk(each)]
        if files:
            cause = f"some of it is mapped from a file on a disk: {files[0]}"
            raise unregistered(number, region, cause, backend=backend, library=library)
    wanted, before = sum(each.nbytes for each in host.values()), pinned()
    if 0 <= most < wanted + before:
        cause = f"it is {wanted >> 10} KiB, {before >> 10} KiB are pinned, and this process may lock {most >> 10} KiB"
        raise TransferError("host memory could not be registered", cause=cause, backend=backend, library=library)
