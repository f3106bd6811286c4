"""Shows what was measured: a table, JSON, and curves."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from statelink import __version__
from statelink.cli import drawing, duration, size

if TYPE_CHECKING:
    from pathlib import Path

    from ._measure import Cell, Found, Plan, Times

__all__ = ["draw", "plain", "table"]


def table(found: Sequence[Found]) -> Table:
    """A row for each cell."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("backend", "blocks", "bytes", "median", "p99", "goodput", "of raw", "of copy"):
        made.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    for each in found:
        name = each.backend
        for cell in each.cells:
            blocks = f"{cell.count} x {_short(cell.block)}"
            times = duration(cell.request.median), duration(cell.request.p99)
            goodput = f"{size(cell.nbytes / cell.request.median)}/s"
            shares = _share(cell.raw, cell.request), _share(cell.copy, cell.request)
            made.add_row(*map(Text, (name, blocks, _short(cell.nbytes), *times, goodput, *shares)))
            name = ""
    return made


def plain(found: Sequence[Found], plan: Plan, peer: str) -> dict[str, Any]:
    """All of it, for JSON. Times are in seconds, goodput in bytes a second."""
    return {
        "machine": {
            "statelink": __version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "peer": peer,
        "plan": plan,
        "backends": [
            {
                "backend": each.backend,
                "transports": each.transports,
                "raw": each.raw,
                "waited": each.waited,
                "error": each.error,
                "hint": each.hint,
                "cells": [
                    {
                        "block": cell.block,
                        "count": cell.count,
                        "bytes": cell.nbytes,
                        "goodput": cell.nbytes / cell.request.median,
                        "request": cell.request,
                        "raw": cell.raw,
                        "copy": cell.copy,
                    }
                    for cell in each.cells
                ],
            }
            for each in found
        ],
    }


def draw(found: Sequence[Found], path: Path) -> None:
    """Write goodput and latency over the bytes of a request: a panel for each size of a block.

    Raises:
        click.ClickException: matplotlib is not installed.
    """
    sizes = sorted({cell.block for each in found for cell in each.cells})
    with drawing(path, (4.0 * max(1, len(sizes)), 6.0)) as figure:
        panels = figure.subplots(2, max(1, len(sizes)), squeeze=False, sharex="col", sharey="row")
        for column, block in enumerate(sizes):
            for number, each in enumerate(found):
                cells = [cell for cell in each.cells if cell.block == block]
                _curves(panels[:, column], each.backend, f"C{number}", cells)
            panels[0, column].set_title(f"blocks of {_short(block)}", fontsize=10)
            panels[1, column].set_xlabel("bytes of a request")
        for panel in panels.flat:
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.xaxis.set_major_formatter(lambda value, _: _short(value))
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.3)
        figure.suptitle("Requests between two processes, and their ceilings", fontsize=11)
        panels[0, 0].set_ylabel("goodput, GiB a second")
        panels[1, 0].set_ylabel("median of requests, seconds")
        if sizes:
            panels[0, 0].legend(fontsize=7)


def _curves(panels: Any, backend: str, colour: str, cells: Sequence[Cell]) -> None:
    """A backend's line in a panel of goodput and in one of latency, with the lines of its ceilings."""
    ways = {"": "-", ": library alone": "--", ": same blocks copied in one process": ":"}
    columns: tuple[list[Times | None], ...] = (
        [each.request for each in cells],
        [each.raw for each in cells],
        [each.copy for each in cells],
    )
    for (name, style), times in zip(ways.items(), columns, strict=True):
        points = [(cell.nbytes, each.median) for cell, each in zip(cells, times, strict=True) if each is not None]
        if not points:
            continue
        label = f"{backend}{name}"
        panels[0].plot(
            [at for at, _ in points],
            [at / took / 2**30 for at, took in points],
            style,
            color=colour,
            marker="o" if not name else None,
            markersize=3,
            label=label,
        )
        panels[1].plot([at for at, _ in points], [took for _, took in points], style, color=colour, label=label)


def _short(nbytes: float) -> str:
    """Without a fraction that is zero."""
    return size(nbytes).replace(".0 ", " ")


def _share(ceiling: Times | None, request: Times) -> str:
    """The part of a ceiling that a request reaches."""
    return "-" if ceiling is None else f"{100 * ceiling.median / request.median:.0f} %"
