"""Finds out whether the calling thread lets go of the interpreter."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


@contextmanager
def spinning() -> Iterator[Spinner]:
    """A spinner beside the block. Meanwhile, no thread takes the interpreter from one that keeps it."""
    interval, made = sys.getswitchinterval(), Spinner()
    thread = threading.Thread(target=made.run, daemon=True)
    sys.setswitchinterval(3600)
    try:
        thread.start()
        yield made
    finally:
        made.stop = True
        sys.setswitchinterval(interval)
        thread.join()
