"""What keeps the machine busy beside a link, as an engine does."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

__all__ = ["BUSY", "SHORT", "Spin", "intervals", "spins"]

BUSY = ("none", "process", "prefill", "decode", "both", "scheduler")
"""Nothing; a process of its own, which takes a core and leaves the interpreters alone; a thread of pure Python in these
processes; one in the sending process that computes 2 ms of Python, and then 1 ms without the interpreter."""

SHORT = 0.001
"""Seconds of a switch interval that is shorter than Python's own."""

LOOP = "print(flush=True)\nwhile True: pass"


def intervals(busy: str) -> tuple[float | None, ...]:
    """The switch intervals to measure with: Python's own, and where a thread keeps the interpreter, `SHORT`."""
    return (None, SHORT) if busy in ("prefill", "decode") else (None,)


def spins(busy: str) -> tuple[str, str]:
    """How the sending and the receiving process are busy."""
    if busy in ("scheduler", "process"):
        return busy, "none"
    return ("all" if busy in ("prefill", "both") else "none"), ("all" if busy in ("decode", "both") else "none")


class Spin:
    """A thread that runs Python while it is on, and counts how often it comes round; or another process.

    Args:
        how: ``all`` the time; ``scheduler``: 2 ms, and then 1 ms without the interpreter; ``process``: a process of its
            own does, which does not count; ``none``: never.

    Attributes:
        count: How often it came round.
        cpu: Its CPU time, in seconds. Not that of another process.
    """

    def __init__(self, how: str) -> None:
        self.count, self.cpu = 0, 0.0
        self._stop = False
        self._on = threading.Event()
        self._how = how
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None

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
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        elif on and self._how != "none":
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
        if self._how == "process":
            self._process = subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE)
            assert self._process.stdout is not None
            self._process.stdout.readline()
            self.set(False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._on.set()
        self._thread.join()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
