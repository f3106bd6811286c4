"""Looking at a machine, and trying what may end the process, as plugins over native libraries have to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from statelink.backend._capabilities import Check, Verdict

__all__ = [
    "Ended",
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

_root = Path("/")
"""Where this machine's files are looked for; `seen_in` sets it."""


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        status: Its exit status, or a signal's number below 0; ``None`` where it did not end in time.
        how: The same in words.
        output: What it wrote to standard output.
        errors: What it wrote to standard error.
    """

    status: int | None
    how: str
    output: str = ""
    errors: str = ""

    @property
    def last(self) -> str:
        """The last line that it wrote, to standard error if it wrote there."""
        lines = [line.strip() for line in (self.output + "\n" + self.errors).splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def elsewhere(code: str, *arguments: str, patience: float = 60.0) -> Ended:
    """Run Python code in a process of its own, which a library may end as it likes.

    It finds the packages that this process finds, and has ``arguments`` in ``sys.argv[1:]``. Blocks until it has ended,
    or was killed after ``patience`` seconds; safe from any thread.
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


def on_machine(path: str) -> Path:
    """Where to look for a device file or a setting of this machine, given as an absolute path.

    That is the path itself, but in a test that uses `statelink.testing.bare_machine`. Any thread.
    """
    return _root / path.lstrip("/")


@contextlib.contextmanager
def seen_in(root: Path) -> Iterator[None]:
    """Look for this machine's files and shared libraries below a folder; for the whole process, one after the other."""
    global _root
    before, _root = _root, root
    try:
        yield
    finally:
        _root = before


def lacking(library: object, needed: Mapping[str, str]) -> list[str]:
    """What this version of a library does not have, as ``Class.method``.

    Args:
        library: The imported module.
        needed: To the name of each class in it, the names that are needed of that, separated by blanks.
    """
    names = ((kind, name) for kind, members in needed.items() for name in members.split())
    return [f"{kind}.{name}" for kind, name in names if not hasattr(getattr(library, kind, None), name)]


def loads(library: str) -> bool:
    """Whether the loader loads a shared library, by name or path; a process of its own tries, and this one waits."""
    if _root != Path("/"):
        return (_root / "lib" / Path(library).name).exists()
    return elsewhere("import ctypes, sys; ctypes.CDLL(sys.argv[1])", library).status == 0


def needs(lacks: Iterable[str], found: str) -> Iterator[Check]:
    """What a machine lacks, one check each; if that is nothing, what was found."""
    lack = None
    for lack in lacks:
        yield Check(what="needs", verdict=Verdict.PROBLEM, found=lack)
    if lack is None:
        yield Check(what="needs", verdict=Verdict.OK, found=found)


def settings(*prefixes: str) -> Check:
    """What the environment sets for a library, by how the names of its variables begin."""
    seen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]
    found = ", ".join(seen) or f"no {' or '.join(f'{each}*' for each in prefixes)} is set"
    return Check(what="environment", verdict=Verdict.OK, found=found)


def rdma_devices() -> dict[str, list[str]]:
    """RDMA devices of this host, whatever the state of their ports, and the numbers of those ports that are active."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for device in sorted(on_machine("/sys/class/infiniband").iterdir()):
            ports = sorted(device.glob("ports/*"))
            found[device.name] = [port.name for port in ports if _text(port / "state").endswith("ACTIVE")]
    return found


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, for a library that reads them when something of it is made.

    The environment is the process's: the caller holds a lock that keeps others from doing the same.
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
