"""How every command prints, and how it ends: exit statuses, and output that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, Final, NoReturn, TextIO

import click
import msgspec

from statelink.errors import StatelinkError

__all__ = [
    "INTERRUPTED",
    "PIPE_CLOSED",
    "UNWRITABLE",
    "CodedError",
    "Program",
    "encodable",
    "ended_by_signal",
    "json_option",
    "plain_error",
    "print_json",
    "unwritable",
]

UNWRITABLE: Final = 74
"""Exit status if output or a file cannot be written. The number is that of ``EX_IOERR``."""
INTERRUPTED: Final = 130
"""Exit status after an interrupt. A shell gives the same to a process that SIGINT ended."""
PIPE_CLOSED: Final = 141
"""Exit status if a pipe's reader has gone. A shell gives the same to a process that SIGPIPE ended."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""System errors after which no file of the file system can be written."""

BLANKS: Final = re.compile(r" +\n")
"""Blanks with which rich fills the lines of a table up to its width. Pipes and files get the lines without them."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
"""The option of a command that prints its result as JSON on standard output."""


def print_json(value: Any) -> None:
    """Print a value of plain types or `msgspec` structs as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(encodable(value))).decode())


def encodable(value: Any) -> Any:
    """The same value of plain types, with every text such as JSON can carry: half a surrogate pair becomes an escape.

    Texts of plugins and of the environment may have such halves.

    Args:
        value: Plain types or `msgspec` structs.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(each) for each in value]
    return encodable(msgspec.to_builtins(value)) if isinstance(value, msgspec.Struct) else value


def plain_error(error: StatelinkError) -> dict[str, Any]:
    """An error as plain types, for JSON: its code, and the parts of its text."""
    return {key: getattr(error.reason, key) for key in ("code", "what", "who", "cause", "hint")}


class _FullError(click.ClickException):
    exit_code = UNWRITABLE


class CodedError(click.ClickException):
    """A `StatelinkError`, printed with its code."""

    def __init__(self, error: StatelinkError) -> None:
        super().__init__(str(error))
        self.code = error.code

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"Error [{self.code}]: {self.message}", file=file, err=file is None)


def unwritable(error: OSError, file: object) -> click.ClickException:
    """The error of a command that cannot write a file. ``file`` names it where the system does not."""
    kind = _FullError if error.errno in FULL else click.ClickException
    return kind(f"{error.filename or file} cannot be written: {error.strerror or error}")


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """Within the block, SIGTERM unwinds the main thread as an interrupt does, so that child processes can be ended."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Program(click.Group):
    """A group of commands that ends without a traceback if it is interrupted or its output cannot be written.

    A `StatelinkError` that a command lets through is printed like an error of the command.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command, and end the process, unless ``standalone_mode`` is false. See `click.Command.main`."""
        run: Callable[[], Any] = partial(super().main, *args, **{**extra, "standalone_mode": False})
        if not extra.get("standalone_mode", True):
            return run()
        status = UNWRITABLE
        with _checked_streams() as lost:
            try:
                status = _status(run)
                if sys.stdout is not None:  # it is None if the process was started with it closed
                    sys.stdout.flush()
            except _LostError as error:
                lost.append(error)
        if lost:
            _end_lost(lost[0])
        sys.exit(status)


def _status(run: Callable[[], Any]) -> int:
    """Run a command. Returns its exit status."""
    try:
        # click returns the status of an early end, such as that of `--help`.
        ended = run()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except StatelinkError as error:
        CodedError(error).show()
        return 1
    except click.Abort:  # click makes it of KeyboardInterrupt
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in FULL:
            raise
        made = unwritable(error, "a file")
        made.show()
        return made.exit_code
    except SystemExit as error:
        if isinstance(error.code, str):
            click.echo(error.code, err=True)
            return 1
        return error.code or 0
    return ended if isinstance(ended, int) else 0


def _end_lost(error: _LostError) -> NoReturn:
    if error.cause.errno == errno.EPIPE:
        sys.exit(PIPE_CLOSED)
    # If standard error cannot be written either, nobody can be told.
    with contextlib.suppress(OSError):
        click.echo(f"Error: the output cannot be written: {error.cause.strerror}", err=True)
    sys.exit(UNWRITABLE)


class _LostError(Exception):
    """Output cannot be written. This is no `OSError`: click and rich catch some of those and end the process."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _CheckedText(io.TextIOWrapper):
    """A stream that raises `_LostError` if it cannot be written. After that, it writes to the null device.

    This class does not override the methods of the buffer below. In a method of Python, an interrupt could come between
    the write and the buffer's note of it. Then the same text would be written twice.
    """

    def write(self, text: str, /) -> int:
        try:
            super().write(text if self.line_buffering else BLANKS.sub("\n", text))
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> NoReturn:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        raise _LostError(error) from error


@contextlib.contextmanager
def _checked_streams() -> Iterator[list[_LostError]]:
    """Check what is written to standard output and standard error, within the block.

    Yields:
        A list, to which errors are appended that occur when the block ends.
    """
    kept, lost = (sys.stdout, sys.stderr), list[_LostError]()
    sys.stdout, sys.stderr = _checked(sys.stdout), _checked(sys.stderr)
    ours = sys.stdout, sys.stderr
    try:
        yield lost
    finally:
        for stream, before in zip(ours, kept, strict=True):
            if stream is not before and stream is not None:
                try:
                    stream.flush()
                except _LostError as error:
                    lost.append(error)
        sys.stdout, sys.stderr = kept


def _checked(stream: TextIO) -> TextIO:
    """A checked stream over the same descriptor. A closed stream, or one without a descriptor, is returned as it is."""
    try:
        number = stream.fileno()
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return stream
    buffered = io.BufferedWriter(io.FileIO(number, "wb", closefd=False))
    # What the terminal's encoding lacks is escaped instead of refused.
    return _CheckedText(buffered, stream.encoding, "backslashreplace", line_buffering=stream.isatty())
