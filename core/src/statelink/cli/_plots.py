"""Figures as SVG or PNG, with matplotlib if it is installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from statelink.hints import install_hint

from ._output import unwritable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMATS", "drawing", "picture_path"]

FORMATS: Final = (".svg", ".png")


def picture_path(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check the value of an option that names a picture, before anything is measured.

    Raises:
        click.ClickException: The ending is of another format, or matplotlib is not installed.
    """
    if path is None:
        return None
    if path.suffix.lower() not in FORMATS:
        raise click.BadParameter(f"{path} does not end in {' or '.join(FORMATS)}", context, parameter)
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException(f"pictures need matplotlib\nhint: {install_hint('statelink[plot]')}")
    return path


@contextlib.contextmanager
def drawing(path: Path, inches: tuple[float, float]) -> Iterator[Any]:
    """A matplotlib figure, which is written to a file at the end of the block. Opens no window.

    Args:
        path: Where to; its ending chooses the format.
        inches: Width and height.

    Raises:
        click.ClickException: The file cannot be written.
    """
    # Imported by name, because the core does not depend on it. A figure without pyplot has no global state.
    matplotlib: Any = importlib.import_module("matplotlib")
    figure_of: Any = importlib.import_module("matplotlib.figure")
    with matplotlib.rc_context({"svg.hashsalt": "statelink", "svg.fonttype": "none", "savefig.dpi": 150}):
        figure = figure_of.Figure(figsize=inches, layout="constrained")
        yield figure
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise unwritable(error, path) from error
