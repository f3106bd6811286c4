"""What a process sees of its system: the kernel's files, and the libraries that it has loaded, as a test makes them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from typing_extensions import Self

MAPS = "/proc/self/maps"
DRIVERS = ("libcuda.so", "libamdhip64.so", "/dev/kfd", "/dev/dri/")


class System:
    """A context manager: within it, the system is as its attributes say.

    Args:
        root: A folder to be found where ``/proc``, ``/sys`` and ``/dev`` are; those of this machine if not given.

    Attributes:
        texts: Path to what that file holds instead; ``None`` where there is no such file.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.texts: dict[str, str | Callable[[], str] | None] = {}
        self._root = root
        self._libraries: dict[str, Any] = {}
        self._patch = pytest.MonkeyPatch()
        self._read = Path.read_text

    def load(self, *libraries: tuple[str, Any]) -> Self:
        """Have loaded these, by path, and no other driver; what is no library is a file that is mapped."""
        self._libraries = dict(libraries)
        lines = [f"{n + 1:x}000-{n + 2:x}000 r--p 00000000 00:00 0  {each}\n" for n, each in enumerate(self._libraries)]

        def text() -> str:
            real = self._read(Path(MAPS), errors="surrogateescape").splitlines(keepends=True)
            return "".join([*lines, *(line for line in real if not any(name in line for name in DRIVERS))])

        self.texts[MAPS] = text
        return self

    def __enter__(self) -> Self:
        for name in ("iterdir", "glob", "exists"):
            self._patch.setattr(Path, name, self._moved(getattr(Path, name)))
        read, find, library = self._moved(self._read), self.texts, ctypes.CDLL

        def read_text(path: Path, *args: Any, **named: Any) -> str:
            if str(path) not in find:
                return str(read(path, *args, **named))
            text = find[str(path)]
            if text is None:
                raise FileNotFoundError(str(path))
            return text() if callable(text) else text

        def load(name: Any, *args: Any, **named: Any) -> Any:
            if name not in self._libraries:
                return library(name, *args, **named)
            if self._libraries[name] is None:
                raise OSError(f"{name} is not loaded")
            return self._libraries[name]

        self._patch.setattr(Path, "read_text", read_text)
        self._patch.setattr(ctypes, "CDLL", load)
        for name in ("statvfs", "access"):
            self._patch.setattr(os, name, self._moved(getattr(os, name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()

    def _moved(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call whose first argument is a path, below the root where the system's is meant."""

        def moved(path: Any, *args: Any, **named: Any) -> Any:
            if self._root is not None and str(path).startswith(("/proc/", "/sys/", "/dev/")):
                path = self._root / str(path)[1:]
            elif self._root is not None and str(path) == "/dev":
                path = self._root / "dev"
            return call(path, *args, **named)

        return moved
