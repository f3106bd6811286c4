"""A thread that keeps the interpreter busy, as an engine's scheduler does beside a link."""

from __future__ import annotations

import threading
import time

__all__ = ["BUSY", "Spin", "spins"]

BUSY = ("none", "prefill", "decode", "both", "scheduler")


def spins(busy: str) -> tuple[str, str]:
    """How the sending and the receiving process are busy."""
    if busy == "scheduler":
        return "scheduler", "none"
    return ("all" if busy in ("prefill", "both") else "none"), ("all" if busy in ("decode", "both") else "none")


class Spin:
    """A thread that runs Python while it is on, and counts how often it comes round.

    Args:
        how: ``all`` the time; ``scheduler``: 2 ms, and then 1 ms without the interpreter; ``none``: never.

    Attributes:
        count: How often it came round.
        cpu: Its CPU time, in seconds.
    """

    def __init__(self, how: str) -> None:
        self.count, self.cpu = 0, 0.0
        self._stop = False
        self._on = threading.Event()
        self._how = how
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)

    def _run(self) -> None:
        while self._on.wait() and not self._stop:
            until = time.perf_counter() + 0.002
            while time.perf_counter() < until:
                for _ in range(200):
                    pass
                self.count += 1
            self.cpu = time.thread_time()
            if self._how == "scheduler":
                time.sleep(0.001)

    def set(self, on: bool) -> None:
        """Begin, or pause within 2 ms."""
        if on and self._how != "none":
            self._on.set()
        else:
            self._on.clear()

    def rate(self, seconds: float = 0.3) -> float:
        """How often it comes round in a second while this thread does nothing. It is on afterwards."""
        self.set(True)
        time.sleep(0.05)
        count, began = self.count, time.perf_counter()
        time.sleep(seconds)
        return (self.count - count) / (time.perf_counter() - began)

    def __enter__(self) -> Spin:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._on.set()
        self._thread.join()
