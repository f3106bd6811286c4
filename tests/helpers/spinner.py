"""Finds out which calls let go of the interpreter, so that a thread that computes takes it."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType


class Spinner:
    """A thread that counts while it has the interpreter."""

    def __init__(self) -> None:
        self.count = 0
        self.stop = False

    def run(self) -> None:
        while not self.stop:
            self.count += 1
            if self.count % 1000 == 0:
                time.sleep(1e-6)  # lets another thread have it

    def lost(self, calls: int, call: Callable[[], object]) -> int:
        """How many of so many calls let this thread have the interpreter."""
        lost = 0
        for _ in range(calls):
            before = self.count
            call()
            lost += self.count != before
        return lost


class Releases:
    """Which calls let a spinner have the interpreter, on threads that are started after `watch`.

    Attributes:
        found: How often each function did, as ``file.py:function``, and in which function one of C's was called.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._spinner: Spinner | None = None
        self._open: dict[int, list[list[int]]] = {}

    def watch(self) -> None:
        """Look at every call of every thread from now on."""
        threading.setprofile(self._profile)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Run a spinner beside the block, and note what lets it have the interpreter."""
        threading.setprofile(None)
        with spinning() as self._spinner:
            yield
            self._spinner, _ = None, None

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        calls = self._open.setdefault(threading.get_ident(), [])
        count = self._spinner.count if self._spinner is not None else 0
        if event in ("call", "c_call"):
            calls.append([count, 0])
        elif calls:
            before, inside = calls.pop()
            if self._spinner is not None and count - before > inside:
                where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}"
                self.found[where if event == "return" else f"{argument.__name__} in {where}"] += 1
            if calls:
                calls[-1][1] += count - before


@contextmanager
def spinning() -> Iterator[Spinner]:
    """A spinner beside the block. Meanwhile, no thread takes the interpreter from one that keeps it.

    Nothing is collected, either: what an earlier test left behind may close a file, which lets go of the interpreter.
    """
    interval, made = sys.getswitchinterval(), Spinner()
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    thread = threading.Thread(target=made.run, daemon=True)
    sys.setswitchinterval(3600)
    try:
        thread.start()
        time.sleep(0.05)  # a thread that has waited since before still takes it, after the interval that was set then
        yield made
    finally:
        made.stop = True
        sys.setswitchinterval(interval)
        thread.join()
        if collects:
            gc.enable()
