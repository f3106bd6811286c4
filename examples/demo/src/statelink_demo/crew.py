"""The parent's end: worker processes that are started, heard and ended, each within a bound."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from statelink_demo.messages import Command, Event, Stopped

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Crew", "DemoError", "Role", "SilenceError"]

Role = Literal["reference", "prefill", "decode"]

FAREWELL = 20.0
"""Seconds that workers may take to close their links and exit."""
LAST_WORDS = 2000
"""Most characters of a crashed worker's output that are shown."""


class DemoError(Exception):
    """The demo cannot go on; the message is for the user."""


class SilenceError(DemoError):
    """Nobody said anything in time."""


class _Worker:
    """One process, its pipes, and what it prints, which is kept for the case that it crashes."""

    def __init__(self, role: Role, heard: queue.SimpleQueue[tuple[Role, Event | None]]) -> None:
        self.role = role
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
        self._encoder = msgspec.json.Encoder()
        # A session of its own: an interrupt from the terminal reaches the parent alone, which then ends everything.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "statelink_demo.worker", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(heard,), name=f"hear-{role}", daemon=True).start()

    def _read(self, heard: queue.SimpleQueue[tuple[Role, Event | None]]) -> None:
        decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                heard.put((self.role, decoder.decode(line)))
        heard.put((self.role, None))

    def send(self, command: Command) -> None:
        assert self.process.stdin is not None
        # A worker that is gone cannot be told; its end is noticed where its events are read.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(self._encoder.encode(command) + b"\n")
            self.process.stdin.flush()

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self, timeout: float) -> int | None:
        try:
            return self.process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.hang_up()
        if self.process.poll() is None:
            self.process.terminate()
            if self.wait(2.0) is None:
                self.process.kill()
                self.process.wait()
        self._printed.close()

    def last_words(self) -> str:
        size = os.fstat(self._printed.fileno()).st_size
        return os.pread(self._printed.fileno(), LAST_WORDS, max(0, size - LAST_WORDS)).decode(errors="replace").strip()


class Crew:
    """The workers of a demo. A context manager: none outlives it.

    Args:
        roles: Which to start.
        timeout: Seconds without a word from anybody after which the demo is given up.
    """

    def __init__(self, *roles: Role, timeout: float) -> None:
        self._timeout = timeout
        self._heard: queue.SimpleQueue[tuple[Role, Event | None]] = queue.SimpleQueue()
        self._workers: dict[Role, _Worker] = {}
        self._ended: set[Role] = set()
        try:
            for role in roles:
                self._workers[role] = _Worker(role, self._heard)
        except BaseException:
            self._kill()
            raise

    def send(self, role: Role, command: Command) -> None:
        """Give a worker a command."""
        self._workers[role].send(command)

    def hear(self, waiting_for: str, timeout: float | None = None) -> tuple[Role, Event]:
        """Return the next event.

        Args:
            waiting_for: What the caller waits for, for the error message.
            timeout: Seconds to wait instead of the crew's own.

        Raises:
            SilenceError: Nobody said anything in time.
            DemoError: A worker stopped or crashed.
        """
        seconds = self._timeout if timeout is None else timeout
        try:
            role, event = self._heard.get(timeout=seconds)
        except queue.Empty:
            raise SilenceError(f"nothing was heard for {seconds:g} s while waiting for {waiting_for}") from None
        if event is None:
            raise DemoError(self._obituary(role))
        if isinstance(event, Stopped):
            raise DemoError(event.why)
        return role, event

    def dismiss(self) -> None:
        """Let every worker close its link and end.

        Raises:
            DemoError: One did not end in time, or not with status 0.
        """
        for worker in self._workers.values():
            worker.hang_up()
        until = time.monotonic() + FAREWELL
        for role, worker in self._workers.items():
            status = worker.wait(until - time.monotonic())
            if status is None:
                raise DemoError(f"{role} did not end within {FAREWELL:g} s of being asked to")
            if status:
                raise DemoError(self._obituary(role))

    def _obituary(self, role: Role) -> str:
        worker = self._workers[role]
        status = worker.wait(5.0)
        if status is None:
            how = "closed its pipe and did not exit"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        words = worker.last_words()
        return f"{role} {how}" + (f"; its last words:\n{words}" if words else "")

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
