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
    """A thread that keeps the interpreter busy, and counts how often it came round."""

    def __init__(self, how: str) -> None:
        self.count, self.cpu = 0, 0.0
        self._stop = False
        self._rest = 0.001 if how == "scheduler" else 0.0
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)

    def _run(self) -> None:
        while not self._stop:
            until = time.perf_counter() + 0.002
            while time.perf_counter() < until:
                for _ in range(200):
                    pass
                self.count += 1
            self.cpu = time.thread_time()
            if self._rest:
                time.sleep(self._rest)

    def __enter__(self) -> Spin:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
