"""Does work that may end its process, such as importing a library, in a child process of its own.

The child is forked, so that it starts in milliseconds. The command's own process imports no plugin and starts no
thread, so nothing in it can be broken by a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import io
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from ._output import encodable

__all__ = ["Alone", "Ended", "end_all", "ended_with"]

CHILD_SECONDS: Final = 120.0
"""Seconds after which a child is ended. Libraries take up to half a minute on a busy machine."""
LOOK_SECONDS: Final = 0.5
"""Seconds between two looks at the time."""
MOST_KEPT_BYTES: Final = 1 << 14
"""Bytes that are kept of the beginning, and of the end, of what a child prints."""
LIMITS: Final = "is a limit of this shell too low (ulimit -a)?"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_started: Final[set[Alone]] = set()
"""What was started and not closed."""


class Ended(Exception):
    """The child ended, or had to be ended, before its work was done.

    Attributes:
        found: How it ended, what it loaded last, and what it printed, as the end of a clause about the child's work.
        hint: What to do about it.
    """

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found)
        self.found, self.hint = found, hint


class Alone:
    """Work in a child process. `values` has its results; `close` ends it. A context manager.

    The child prints to nowhere, and what it prints is shown only if it ends too early.

    Args:
        work: Called in the child. It yields plain values, which are sent as JSON.
    """

    def __init__(self, work: Callable[[], Iterable[Any]]) -> None:
        self._results, results = os.pipe()
        self._printed, printed = os.pipe()
        self._beginning, self._last = b"", b""
        self._file = ""
        # Python ignores what a signal's handler raises in the callbacks of a fork, so signals wait until after them. A
        # mask would not do: the kernel then gives the signal to a thread of numpy's, and Python handles it at once.
        came: list[int] = []
        handlers = {each: signal.signal(each, lambda number, _: came.append(number)) for each in SIGNALS}
        with warnings.catch_warnings():
            # numpy's threads are prepared for a fork, and there are no others.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            _child(work, results, printed)
        _started.add(self)
        os.close(results)
        os.close(printed)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)

    def values(self) -> Iterator[Any]:
        """What the work yields, as it comes.

        Raises:
            Ended: The child ended before its work was done.
        """
        until, rest = time.monotonic() + CHILD_SECONDS, b""
        while True:
            ready = select.select([self._results, self._printed], [], [], LOOK_SECONDS)[0]
            if not ready and time.monotonic() < until:
                continue
            if not ready:
                self._kill()
                raise self._ended(f"came to no end within {CHILD_SECONDS:g} seconds")
            if self._printed in ready:
                self._note(os.read(self._printed, 1 << 16))
            if self._results not in ready:
                continue
            read = os.read(self._results, 1 << 16)
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                kind, value = msgspec.json.decode(line, type=tuple[str, Any])
                if kind == "done":
                    return
                if kind == "file":
                    self._file = value
                elif kind == "defect":
                    raise RuntimeError(value)
                else:
                    yield value
            if not read:
                raise self._ended(f"ended the process: {ended_with(self._wait())}")

    def close(self) -> None:
        """End the child. May be called twice."""
        self._kill()
        _started.discard(self)
        for each in (self._results, self._printed):
            if each >= 0:
                os.close(each)
        self._results = self._printed = -1

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _kill(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
            self._wait()

    def _wait(self) -> int:
        status = os.waitpid(self._pid, 0)[1]
        self._pid = 0  # not before that: an interrupt may come while this waits
        return os.waitstatus_to_exitcode(status)

    def _note(self, printed: bytes) -> None:
        self._beginning = (self._beginning + printed)[:MOST_KEPT_BYTES]
        self._last = (self._last + printed)[-MOST_KEPT_BYTES:]

    def _ended(self, how: str) -> Ended:
        while select.select([self._printed], [], [], 0)[0]:
            if not (printed := os.read(self._printed, 1 << 16)):
                break
            self._note(printed)
        file = f"; the last library that it loaded: {self._file}" if self._file else ""
        return Ended(f"{how}{file}{self._noise()}", _hint(self._file))

    def _noise(self) -> str:
        """A few of the first and of the last lines that the child printed."""
        first, last = (
            [line.strip() for line in part.decode(errors="replace").splitlines() if line.strip()]
            for part in (self._beginning, self._last)
        )
        lines = first if len(first) <= 4 else [*first[:3], "...", last[-1]]
        return f"; printed: {' | '.join(line[:160] for line in lines)}" if lines else ""


def end_all() -> None:
    """End every child. An interrupt may come before the code that ends a child has begun to wait for it."""
    for each in [*_started]:
        each.close()


def ended_with(status: int) -> str:
    """The name of the signal that ended a process, or its exit status."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):  # signals of real time have no name
        return signal.Signals(-status).name
    return f"signal {-status}"


def _hint(file: str) -> str:
    """What to do about a library that ends its process."""
    owner = _owner(file) if file else ""
    if not owner:
        return f"install the library again; {LIMITS}"
    return f"install the library again (pip install --force-reinstall --no-deps {owner}); {LIMITS}"


def _owner(file: str) -> str:
    """The distribution that brought a file; empty if none did."""
    with contextlib.suppress(Exception):  # metadata of any package may be unreadable
        path = os.path.realpath(file)
        for each in importlib.metadata.distributions():
            name = Path(path).name
            if any(
                part.name == name and os.path.realpath(str(each.locate_file(part))) == path for part in each.files or ()
            ):
                return str(each.metadata["Name"])
    return ""


# This part runs in the child.


def _child(work: Callable[[], Iterable[Any]], results: int, printed: int) -> NoReturn:
    """Do the work, and end this process without the clean-up of the one from which it was forked."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
        faulthandler.disable()
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((nowhere, 0), (printed, 1), (printed, 2)):
            os.dup2(number, target)
        stream = io.TextIOWrapper(io.FileIO(printed, "w"), errors="backslashreplace", write_through=True)
        sys.stdout = sys.stderr = stream
        sys.addaudithook(lambda event, values: _loads(results, event, values))
        try:
            for value in work():
                _say(results, "value", value)
        except Exception:
            _say(results, "defect", traceback.format_exc())
        else:
            _say(results, "done", None)
    finally:
        os._exit(0)


def _say(results: int, kind: str, value: Any) -> None:
    left = msgspec.json.encode(encodable((kind, value))) + b"\n"
    while left:
        left = left[os.write(results, left) :]


def _loads(results: int, event: str, values: tuple[Any, ...]) -> None:
    """Say which library file is about to be loaded. An import that names no file is one of Python code."""
    file = values[1] if event == "import" else values[0] if event == "ctypes.dlopen" else None
    if isinstance(file, str) and os.sep in file:
        with contextlib.suppress(OSError):
            _say(results, "file", file)
