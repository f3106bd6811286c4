"""What commands need of files: a folder for a short time, and enough open ones."""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from statelink.errors import StatelinkError

__all__ = ["LEAST_FILES", "FolderError", "few_files", "most_files", "temporary_folder"]

LEAST_FILES: Final = 256
"""Least limit of open files with which libraries work. With 64, some cannot connect to their first peer."""


class FolderError(StatelinkError):
    """No temporary folder can be written."""

    default_code = "command.folder"


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder that is removed at the end of the block.

    Raises:
        FolderError: It cannot be made, or no file in it can be written.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise _unwritable(error) from error
    with made as name:
        folder = Path(name)
        try:
            (folder / "written").write_text("here\n")
        except OSError as error:
            raise _unwritable(error) from error
        yield folder


def _unwritable(error: OSError) -> FolderError:
    hint = "set TMPDIR to a directory that can be written and has space; look at the limit of a file's size (ulimit -f)"
    return FolderError("no temporary file can be written", cause=error.strerror or str(error), hint=hint)


def most_files() -> int | None:
    """How many files this process may have open; ``None`` for any number."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def few_files() -> str:
    """What to do if libraries may lack open files; empty if they have enough."""
    most = most_files()
    if most is None or most >= LEAST_FILES:
        return ""
    return f"this process may have only {most} files open: raise the limit (ulimit -n 1024, LimitNOFILE), and try again"
