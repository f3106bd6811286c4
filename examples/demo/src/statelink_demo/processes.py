"""The demo's processes: both ends of their pipes, and the parent that starts, hears and ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from statelink.errors import StatelinkError
from statelink_demo.messages import Event, Ready, Serve, Solved, Stopped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from types import TracebackType

    from statelink_demo.messages import Role, Settings

__all__ = ["Crew", "DemoError", "Pipe", "SilenceError", "StoppedError"]

FAREWELL = 20.0
"""Seconds that workers may take to close their links and exit."""
LAST_WORDS = 2000
"""Most characters of a crashed worker's output that are shown."""

_Work = TypeVar("_Work")


class StoppedError(Exception):
    """A worker cannot go on, for a reason that the user can do something about."""


class DemoError(Exception):
    """The demo cannot go on; the message is for the user."""


class SilenceError(DemoError):
    """Nobody said anything in time."""


class Pipe:
    """A worker's end."""

    def __init__(self, end: Connection) -> None:
        self._end = end

    def send(self, event: Event) -> None:
        """Tell the parent."""
        self._end.send_bytes(msgspec.msgpack.encode(event))

    def receive(self, kind: type[_Work]) -> _Work | None:
        """Wait for the next piece of work, or None once the parent hung up."""
        try:
            return msgspec.msgpack.decode(self._end.recv_bytes(), type=kind)
        except EOFError:
            return None


def _work(role: Role, settings: Settings, end: Connection, log: str) -> None:
    """Be a worker until the parent hangs up."""
    # An interrupt from the terminal is for the parent alone, which then ends everything.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print is kept for the case that the worker crashes.
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
    except FileNotFoundError:
        return  # the parent was interrupted while the worker started, and is gone
    os.dup2(file, 1)
    os.dup2(file, 2)
    if role == "prefill":
        from statelink_demo.prefill_worker import run
    elif role == "decode":
        from statelink_demo.decode_worker import run
    else:
        run = _answer_prompts
    pipe = Pipe(end)
    try:
        run(pipe, settings)
    except (StatelinkError, StoppedError) as error:
        pipe.send(Stopped(str(error)))
        sys.exit(1)


def _answer_prompts(pipe: Pipe, settings: Settings) -> None:
    """Be the reference: the same model in one process, with nothing moved."""
    from statelink_demo.engine import reference
    from statelink_demo.model import build_model, configure_torch

    configure_torch()
    model = build_model(settings.seed)
    pipe.send(Ready())
    while (work := pipe.receive(Serve)) is not None:
        for request in work.requests:
            pipe.send(Solved(request.room, reference(model, request.prompt, settings.tokens)))


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let an interrupt wait until the block has ended. Main thread."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


class Crew:
    """The workers of a demo. A context manager: none outlives it.

    Torch and transformers take seconds to import. One process imports them, and the workers are forked from it before
    it does anything else.

    Args:
        timeout: Seconds without a word from anybody after which the demo is given up.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._logs = tempfile.TemporaryDirectory(prefix="statelink-demo-")
        self._workers: dict[Role, tuple[Any, Connection]] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["statelink_demo.prefill_worker", "statelink_demo.decode_worker", "statelink_demo.model_library"]
        )
        # It inherits that interrupts are ignored. One that comes during its imports would else print a traceback.
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, heard)

    def start(self, role: Role, settings: Settings) -> None:
        """Start a worker."""
        ours, theirs = self._context.Pipe()
        log = str(Path(self._logs.name) / role)
        process = self._context.Process(target=_work, args=(role, settings, theirs, log), name=role, daemon=True)
        with _interrupts_wait():  # a worker that gets a part of what it needs to start prints a traceback
            process.start()
        theirs.close()  # so that ours ends when the worker does
        self._workers[role] = process, ours

    def send(self, role: Role, work: msgspec.Struct) -> None:
        """Give a worker work."""
        # A worker that is gone cannot be told; its end is noticed where its events are read.
        with contextlib.suppress(BrokenPipeError):
            self._workers[role][1].send_bytes(msgspec.msgpack.encode(work))

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
        roles = {end: role for role, (_, end) in self._workers.items()}
        ready = connection.wait(list(roles), seconds)
        if not ready:
            raise SilenceError(f"nothing was heard for {seconds:g} s while waiting for {waiting_for}")
        (end, role), *_ = ((end, role) for end, role in roles.items() if end in ready)
        try:
            event = self._decoder.decode(end.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise DemoError(self._obituary(role)) from None
        if isinstance(event, Stopped):
            raise DemoError(event.why)
        return role, event

    def dismiss(self) -> None:
        """Let every worker close its link and end.

        Raises:
            DemoError: One did not end in time, or not with status 0.
        """
        for _, end in self._workers.values():
            end.close()
        until = time.monotonic() + FAREWELL
        for role, (process, _) in self._workers.items():
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                raise DemoError(f"{role} did not end within {FAREWELL:g} s of being asked to")
            if process.exitcode:
                raise DemoError(self._obituary(role))

    def _obituary(self, role: Role) -> str:
        process, _ = self._workers[role]
        process.join(5.0)
        status = process.exitcode
        if status is None:
            how = "closed its pipe and did not exit"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        log = Path(self._logs.name) / role
        words = log.read_text(errors="replace")[-LAST_WORDS:].strip() if log.exists() else ""
        return f"{role} {how}" + (f"; its last words:\n{words}" if words else "")

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, end in self._workers.values():
            end.close()
            process.terminate()
        for process, _ in self._workers.values():
            process.join(2.0)
            if process.exitcode is None:
                process.kill()
            process.join()
        self._logs.cleanup()
