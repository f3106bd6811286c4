"""``statelink new-backend``: makes a package with a working backend, from which to start one's own."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re
from pathlib import Path
from string import Template
from typing import Final

import click

from statelink import __version__
from statelink.backend import API_VERSION
from statelink.registry import known_packages, list_backends

from ._output import json_option, print_json, unwritable

__all__ = ["new_backend"]

NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
MAX_NAME: Final = 40

FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "src/${module}/__init__.py": "init.py",
    "src/${module}/_backend.py": "backend.py",
    "tests/test_conformance.py": "test_conformance.py",
}
"""File of the package to the template from which it is made."""


@click.command("new-backend")
@click.argument("name")
@click.option(
    "--directory",
    "-d",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the package to this folder, which must be empty or absent.  [default: ./statelink-NAME]",
)
@json_option
def new_backend(name: str, directory: Path | None, as_json: bool) -> None:
    """Make a package with a backend called NAME.

    The package can be installed, and passes the conformance kit: its backend moves bytes between the links of one
    process. Existing files are not overwritten.
    """
    problem = _problem(name)
    if problem:
        raise click.ClickException(problem)
    distribution = f"statelink-{name}"
    folder = directory or Path(distribution)
    kind = "".join(part.capitalize() for part in name.split("-")) + "Backend"
    public = sorted((kind, "Options"))
    words = {
        "name": name,
        "distribution": distribution,
        "module": distribution.replace("-", "_"),
        "kind": kind,
        "public": ", ".join(public),
        "quoted": ", ".join(f'"{each}"' for each in public),
        "api": str(API_VERSION),
        "core": _range(__version__),
    }
    try:
        _write(folder, words)
    except OSError as error:
        raise unwritable(error, folder) from error
    if as_json:
        print_json({"backend": name, "package": distribution, "module": words["module"], "folder": str(folder)})
        return
    click.echo(f"{folder}: backend {name!r}, package {distribution}\n")
    click.echo(f"    pip install -e '{folder}[test]'")
    click.echo("    statelink backends")
    click.echo(f"    python -m pytest {folder}")


def _problem(name: str) -> str:
    """Why a backend cannot have this name; empty if it can."""
    if not NAME.fullmatch(name) or len(name) > MAX_NAME:
        return (
            f"{name!r} is not a name for a backend\nhint: at most {MAX_NAME} characters: lower-case letters and "
            "digits, a letter first, words joined by '-'"
        )
    if name.startswith("statelink-"):
        short = name.removeprefix("statelink-")
        return f"{name!r} is the name of a package\nhint: name the backend {short!r}; its package is {name!r} then"
    for listed in list_backends():
        if listed.name == name:
            return f"a backend named {name!r} is installed already: {listed}\nhint: choose another name"
    known = known_packages().get(name)
    if known is not None:
        return f"{name!r} is the name of the backend of {known}\nhint: choose another name"
    try:
        importlib.metadata.distribution(f"statelink-{name}")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"the package 'statelink-{name}' is installed already, and is no backend\nhint: choose another name"


def _range(version: str) -> str:
    """The versions of the core that the package requires: those with the same public names."""
    major, minor, *_ = (int(re.match(r"\d+", part)[0]) for part in version.split(".")[:2])  # type: ignore[index]
    return f">={major}.{minor},<{major}.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"


def _write(folder: Path, words: dict[str, str]) -> None:
    """Write the package into an empty folder."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise click.ClickException(
            f"{folder} exists already, and is not overwritten\nhint: name an empty or a new folder with --directory"
        )
    templates = importlib.resources.files("statelink.cli") / "templates"
    for place, source in FILES.items():
        text = (templates / f"{source}.template").read_text(encoding="utf-8")
        path = folder / Template(place).substitute(words)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(Template(text).substitute(words))
    (folder / "src" / words["module"] / "py.typed").touch(exist_ok=False)
