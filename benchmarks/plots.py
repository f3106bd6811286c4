"""Draws what `python -m benchmarks` measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .pairs import Ratio

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["draw"]

Row = dict[str, Any]
VALUES = {"peers": "us", "in flight": "us", "items": "ns"}
"""Of each kind of growth, the column that is drawn."""


def draw(rows: Sequence[Row], folder: Path) -> Iterator[Path]:
    """Write the plots for which there are rows. Needs matplotlib.

    Args:
        rows: As the benchmarks give them.
        folder: Where to.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "statelink"
    if any(isinstance(value, Ratio) for row in rows for value in row.values()):
        yield _ratios(rows, folder / "ratios.svg")
    if any("growth" in row for row in rows):
        yield _growth(rows, folder / "growth.svg")
    if any("overlap" in row for row in rows):
        yield _overlap([row for row in rows if "overlap" in row], folder / "overlap.svg")


def _ratios(rows: Sequence[Row], path: Path) -> Path:
    """A panel for each ratio, with a line for each row that has it, and the noise behind it."""
    from matplotlib import pyplot

    found: dict[str, list[tuple[str, Ratio, Ratio | None]]] = defaultdict(list)
    for row in rows:
        what = " ".join(
            str(row[key]) for key in ("workload", "line", "backend", "busy", "switch_interval") if row.get(key)
        )
        for name, value in row.items():
            if isinstance(value, Ratio) and name != "noise":
                found[name].append((what, value, row.get("noise")))
    heights = [1 + len(each) for each in found.values()]
    figure, panels = pyplot.subplots(
        len(found), 1, figsize=(8, 0.25 * sum(heights) + 1), height_ratios=heights, squeeze=False
    )
    for panel, (name, lines) in zip(panels[:, 0], found.items(), strict=True):
        for place, (_, value, noise) in enumerate(lines):
            if noise is not None:
                panel.barh(place, noise.high - noise.low, left=noise.low, color="0.9", height=0.9)
            panel.plot([value.low, value.high], [place, place], color="C0", linewidth=2)
            panel.plot(value.median, place, "o", color="C0", markersize=4)
        panel.axvline(1.0, color="0.5", linewidth=0.8)
        panel.set_yticks(range(len(lines)), [what for what, *_ in lines], fontsize=7)
        panel.invert_yaxis()
        panel.set_title(name.replace("_", " "), fontsize=9, loc="left")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _growth(rows: Sequence[Row], path: Path) -> Path:
    """A panel for each kind of growth."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(VALUES), figsize=(12, 3.5))
    for panel, (kind, column) in zip(panels, VALUES.items(), strict=True):
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in rows:
            if row.get("growth") == kind:
                lines[" ".join(str(row[key]) for key in ("backend", "order") if key in row)].append(
                    (row["count"], row[column])
                )
        for label, points in lines.items():
            panel.plot(*zip(*points, strict=True), marker="o", label=label)
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.set_xlabel(kind)
        panel.set_ylabel({"us": "microseconds a room", "ns": "nanoseconds an item"}[column])
        if lines:
            panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _overlap(rows: Sequence[Row], path: Path) -> Path:
    """For each rate, a bar for each way of pushing."""
    from matplotlib import pyplot

    ways = [name for name in rows[0] if name.endswith("_ms")]
    figure, panel = pyplot.subplots(figsize=(8, 3.5))
    for number, way in enumerate(ways):
        places = [place + (number - (len(ways) - 1) / 2) * 0.25 for place in range(len(rows))]
        bars = panel.bar(places, [row[way] for row in rows], width=0.25, label=way.removesuffix("_ms"))
        panel.bar_label(bars, fontsize=7)
    panel.set_xticks(range(len(rows)), [f"{row['mbit']} Mbit/s" for row in rows])
    panel.set_ylabel("ms from the end of the forward\npass to success on decode")
    panel.set_yscale("log")
    panel.legend(title="pushed", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
