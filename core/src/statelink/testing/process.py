"""A process that calls functions: for tests, commands and examples that need another process than their own."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from statelink.errors import StatelinkError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Process", "ProcessError"]

GONE = (EOFError, ConnectionResetError, BrokenPipeError)
"""Errors of a pipe whose other end is closed."""
LAST_WORDS = 4000
"""Most characters of its output that are kept."""
GRACE_SECONDS = 10.0
"""Seconds for a process to end after a signal, or after its pipe is closed."""
_Own = TypeVar("_Own")
_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


class ProcessError(StatelinkError):
    """The process ended, or did not answer.

    Attributes:
        status: Its exit status, which is negative for a signal; ``None`` if it did not answer.
    """

    default_code = "process.ended"
    status: int | None = None


class Process(Generic[_Own]):
    """A new interpreter that calls functions, one after the other, and answers with what they return or raise.

    The first argument of each function is an object that lives there. Functions and their arguments are pickled, so a
    function is found by its module and name. An interrupt from the terminal is for the caller alone. The process ends
    when the caller does: it then calls the object's method ``close``, if it has one. A context manager, which kills it.
    Not for several threads at once.

    Args:
        inside: Makes the object, in the process. What it raises is raised by the first call.
        name: For messages.
        patience: Seconds after which a call counts as stuck.
        environment: Changes to this process's environment; ``None`` removes a variable.
        through: A command that runs the one that follows it in another place, such as a network namespace.
        output: File for what the process prints; by default one that `log` reads.

    Attributes:
        popen: The process, as the system knows it.
    """

    def __init__(
        self,
        inside: Callable[[], _Own],
        *,
        name: str = "the process",
        patience: float = 60.0,
        environment: Mapping[str, str | None] | None = None,
        through: Sequence[str] = (),
        output: IO[Any] | int | None = None,
    ) -> None:
        self.name, self.patience = name, patience
        self._log = tempfile.TemporaryFile() if output is None else None  # noqa: SIM115 - closed in end()
        self._pending = 0
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # The process keeps the mask: no interrupt reaches it, and the one that comes here meanwhile is not lost.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
            try:
                self.popen = subprocess.Popen(
                    [*through, sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=self._log or output,
                    stderr=subprocess.STDOUT,
                    env={key: value for key, value in given.items() if value is not None},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._pipe = Connection(ours.detach())
        with contextlib.suppress(*GONE):  # the first call says that it has ended
            self._pipe.send_bytes(pickle.dumps(inside))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.popen.poll() is None

    @property
    def idle(self) -> bool:
        """Whether the process runs and waits for a call."""
        return self.alive and not self._pending

    def fileno(self) -> int:
        """A descriptor that is readable once there is an answer, or the process has ended."""
        return self._pipe.fileno()

    def __call__(
        self, function: Callable[Concatenate[_Own, _Given], _Answer], *arguments: _Given.args, **named: _Given.kwargs
    ) -> _Answer:
        """Call a function in the process, and wait for its end.

        Raises:
            ProcessError: The process has ended, or did not answer within its patience; it is then aborted.
            Exception: What the function raises. Its cause has the traceback.
        """
        assert not self._pending, "the result of an earlier call is still to be taken"
        self.start(function, *arguments, **named)
        answer: _Answer = self.result()
        return answer

    def start(
        self, function: Callable[Concatenate[_Own, _Given], Any], *arguments: _Given.args, **named: _Given.kwargs
    ) -> None:
        """Begin a call, after those that were begun before. `result` waits for the end of the first of them.

        Raises:
            ProcessError: The process has ended.
        """
        try:
            self._pipe.send_bytes(pickle.dumps((function, arguments, named)))
        except GONE as error:
            raise self._ended() from error
        self._pending += 1

    def returns(self, within: float) -> bool:
        """Whether the call that `start` began ends within some seconds. `result` is still to be called.

        The seconds are counted one by one: if the machine stands still for a minute, that counts as one second.
        """
        while within > 1 and not self._pipe.poll(1.0):
            within -= 1
        return self._pipe.poll(min(within, 1.0))

    def result(self, patience: float | None = None) -> Any:
        """Wait for the end of the call that `start` began, and return or raise as a call does.

        Args:
            patience: Seconds to wait, instead of the process's own.
        """
        seconds = self.patience if patience is None else patience
        if not self.returns(seconds):
            raise self._silent(f"did not answer within {seconds:g} s")
        try:
            good, answer, trace = pickle.loads(self._pipe.recv_bytes())
        except GONE as error:
            raise self._ended() from error
        self._pending -= 1
        if not good:
            raise answer from _ThereError(trace)
        return answer

    def stop(self) -> None:
        """Stop the process, like one whose host swaps, or which a debugger holds. Returns when it stands still."""
        self.popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """Let it run again. One that has ended stays so."""
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process. Returns when it has ended."""
        self.popen.kill()
        self.popen.wait()

    def dismiss(self) -> None:
        """Let the process end by itself, once its call has ended. Does not wait for that; may be called twice."""
        self._pipe.close()
        self.go_on()

    def leave(self, patience: float | None = None) -> int:
        """Let the process end by itself. Returns its exit status.

        Raises:
            ProcessError: It did not end in time; it is then aborted.
        """
        seconds = self.patience if patience is None else patience
        self.dismiss()
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self._silent(f"did not end within {seconds:g} s") from None

    def log(self) -> str:
        """The end of its output, if it has no file of its own for that."""
        if self._log is None or self._log.closed:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-LAST_WORDS:]

    def end(self) -> None:
        """Kill the process and free everything. May be called twice."""
        self.kill()
        self._pipe.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def _ended(self) -> ProcessError:
        self._pending = 0
        try:
            status = self.popen.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return self._silent("closed its pipe, and did not end")
        how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        error = ProcessError(f"{self.name} has ended", cause=f"{how}{self._said()}")
        error.status = status
        return error

    def _silent(self, how: str) -> ProcessError:
        if self.alive:
            self.popen.send_signal(signal.SIGABRT)  # its fault handler prints all stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(GRACE_SECONDS)
        self.kill()
        return ProcessError(f"{self.name} {how}", cause=f"it was aborted{self._said()}", code="process.silent")

    def _said(self) -> str:
        log = self.log().strip()
        return f"; it printed:\n{log}" if log else ""


class _ThereError(Exception):
    """The traceback of an error in the process."""


# This part runs in the process.


def _serve(pipe: Connection) -> None:
    """Answer calls until the other end of the pipe is closed."""
    own, unmade = None, b""
    try:
        own = pickle.loads(pipe.recv_bytes())()
    except GONE:
        return
    except Exception as error:
        unmade = _failed(error)
    with contextlib.suppress(*GONE):
        while True:
            raw = pipe.recv_bytes()
            pipe.send_bytes(unmade or _call(own, raw))
    if close := getattr(own, "close", None):
        close()


def _call(own: object, raw: bytes) -> bytes:
    try:
        function, arguments, named = pickle.loads(raw)
        return pickle.dumps((True, function(own, *arguments, **named), ""))
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> bytes:
    trace = traceback.format_exc()
    try:
        raw = pickle.dumps((False, error, trace))
        pickle.loads(raw)
    except Exception:  # one that cannot be carried over: its words can
        raw = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return raw


if __name__ == "__main__":
    faulthandler.enable()
    # So that objects that are pickled here have the module name that the other side knows.
    from statelink.testing import process

    process._serve(Connection(int(sys.argv[1])))  # noqa: SLF001
