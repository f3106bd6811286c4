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
from typing import IO, Any, Final, NoReturn, TextIO, cast

import click
import msgspec

from statelink.errors import StatelinkError

__all__ = [
    "INTERRUPTED",
    "CodedError",
    "Program",
    "encodable",
    "ended_by_signal",
    "json_option",
    "plain_error",
    "print_json",
    "unwritable",
]

INTERRUPTED: Final = 130
"""Exit status after an interrupt. A shell gives the same to a process that SIGINT ended."""
UNWRITABLE: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""System errors of output that cannot be written: its reader has gone, or the file system takes no more."""

STANDARD: Final = ("stdin", "stdout", "stderr")
"""Python's names of the standard streams. Each has its place here as its descriptor."""

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


class CodedError(click.ClickException):
    """A `StatelinkError`, printed with its code."""

    def __init__(self, error: StatelinkError) -> None:
        super().__init__(str(error))
        self.code = error.code

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"Error [{self.code}]: {self.message}", file=file, err=file is None)


def unwritable(error: OSError, file: object) -> click.ClickException:
    """The error of a command that cannot write a file. ``file`` names it where the system does not."""
    return click.ClickException(f"{error.filename or file} cannot be written: {error.strerror or error}")


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
        _open_standard_streams()
        with ended_by_signal(), _trimmed():
            try:
                status = _status(run)
                sys.stdout.flush()
            except OSError as error:
                if error.errno not in UNWRITABLE:
                    raise
                status = 1
                _lose(error)
        sys.exit(status)


def _open_standard_streams() -> None:
    """Let those that were closed when this process was started read and write nothing.

    Otherwise files would get their descriptors, and a program that this one starts would take such a file for a stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(STANDARD):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(STANDARD):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


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
    except SystemExit as error:
        if isinstance(error.code, str):
            click.echo(error.code, err=True)
            return 1
        return error.code or 0
    return ended if isinstance(ended, int) else 0


def _lose(error: OSError) -> None:
    """Say that output cannot be written, unless a pipe's reader has gone. What is left of it goes nowhere."""
    if error.errno != errno.EPIPE:
        # If standard error cannot be written either, nobody can be told.
        with contextlib.suppress(OSError):
            unwritable(error, "the output").show()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def _trimmed() -> Iterator[None]:
    """Within the block, standard output takes every text, and a pipe or a file gets no blanks at the ends of lines."""
    kept = sys.stdout
    if isinstance(kept, io.TextIOWrapper):
        # What the terminal's encoding lacks is escaped instead of refused.
        kept.reconfigure(errors="backslashreplace")
        if not kept.isatty():
            sys.stdout = cast("TextIO", _Trimmed(kept))
    try:
        yield
    finally:
        sys.stdout = kept


class _Trimmed:
    """A stream of text without the blanks at the ends of its lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """See `io.TextIOBase.write`."""
        return self._stream.write(BLANKS.sub("\n", text) if isinstance(text, str) else text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
