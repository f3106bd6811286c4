"""Hints of errors: the name that was nearly right, and the command that installs a package.

The command has the package by its name, or from the checkout that this one comes from.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["MORE_THREADS", "did_you_mean", "install_hint"]

MORE_THREADS = "raise the limit (ulimit -u, pids.max, TasksMax), or look for what leaves threads behind"
"""What to do where the system allows a process no more threads."""


def did_you_mean(given: object, known: Iterable[str], otherwise: str = "") -> str:
    """A hint that names the nearest of the ``known`` names, or ``otherwise`` if none is near."""
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def install_hint(requirement: str, *, upgrade: bool = False) -> str:
    """A command for a hint. Reads a few files of the checkout, if there is one. Thread-safe; raises nothing.

    Args:
        requirement: Name of a distribution, and its extras in brackets if it needs any.
        upgrade: Whether an older version is installed.
    """
    name, bracket, extras = requirement.partition("[")
    flags = ["-U"] if upgrade else []
    try:
        folder, editable = _checkout()
        path = next(each for each in _projects(folder) if _name_of(each) == name).parent
    except (importlib.metadata.PackageNotFoundError, OSError, StopIteration, ValueError):
        return " ".join(["pip install", *flags, shlex.quote(requirement)])
    return " ".join(["pip install", *(["-e"] if editable else flags), shlex.quote(f"{path}{bracket}{extras}")])


def _checkout() -> tuple[Path, bool]:
    """The checkout from which the core is installed, and whether as editable.

    Raises:
        PackageNotFoundError: The core is not installed.
        ValueError: It is installed in another way.
    """
    # PEP 610: pip writes this file for what was not found by its name.
    found: dict[str, Any] = json.loads(
        importlib.metadata.distribution("statelink").read_text("direct_url.json") or "{}"
    )
    parts = urlsplit(str(found.get("url", "")))
    if parts.scheme != "file" or not isinstance(found.get("dir_info"), dict):
        raise ValueError("not a directory")
    return Path(url2pathname(parts.path)).parent, bool(found["dir_info"].get("editable"))


def _projects(folder: Path) -> Iterator[Path]:
    """The projects of a checkout: they are one or two folders deep."""
    for pattern in ("*/pyproject.toml", "*/*/pyproject.toml"):
        yield from sorted(folder.glob(pattern))


def _name_of(project: Path) -> str:
    table = tomllib.loads(project.read_text(encoding="utf-8")).get("project")
    return str(table.get("name", "")) if isinstance(table, dict) else ""
