"""Draws the plan of a request: ranks on both sides, and a ribbon for each component between two of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statelink.cli import drawing, size

if TYPE_CHECKING:
    from pathlib import Path

    from ._report import Flow, Report

__all__ = ["Ribbon", "draw_flows", "ribbons"]

GAP: Final = 0.35
"""Part of a side's height that lies between its ranks, if there are several."""
LEFT, RIGHT, WIDTH = 0.0, 1.0, 0.03
ROW_INCHES: Final = 0.35
HATCH: Final = "////"


class Ribbon(NamedTuple):
    """One flow, as places on the two sides. Heights are parts of the larger side's bytes; 0 is the top.

    Attributes:
        flow: The flow.
        source: Where it begins on the left.
        target: Where it begins on the right.
        height: How high it is on both.
    """

    flow: Flow
    source: float
    target: float
    height: float


def ribbons(report: Report) -> tuple[list[Ribbon], dict[int, tuple[float, float]], dict[int, tuple[float, float]]]:
    """Place the flows of a report.

    Returns:
        The ribbons; and for each rank of prefill and of decode, top and bottom of its box.
    """
    total = max(1, report.nbytes)
    left = _boxes([(rank.rank, rank.nbytes / total) for rank in report.prefill])
    right = _boxes([(rank.rank, rank.nbytes / total) for rank in report.decode])
    used = {"left": {rank: top for rank, (top, _) in left.items()}, "right": {r: top for r, (top, _) in right.items()}}
    order = {component.component: at for at, component in enumerate(report.totals)}
    flows = sorted(report.flows, key=lambda flow: (flow.source, flow.target, order[flow.component]))
    placed = []
    for flow in flows:
        height = flow.nbytes / total
        placed.append(Ribbon(flow, used["left"][flow.source], used["right"][flow.target], height))
        used["left"][flow.source] += height
        used["right"][flow.target] += height
    return placed, left, right


def _boxes(ranks: Sequence[tuple[int, float]]) -> dict[int, tuple[float, float]]:
    """Top and bottom of each rank, with equal gaps between them."""
    gap = GAP / (len(ranks) - 1) if len(ranks) > 1 else 0.0
    boxes, at = {}, 0.0 if len(ranks) > 1 else GAP / 2
    for rank, height in ranks:
        boxes[rank] = at, at + height
        at += height + gap
    return boxes


def draw_flows(report: Report, path: Path, labels: tuple[Mapping[int, str], Mapping[int, str]]) -> None:
    """Write the picture. Ribbons of small blocks are hatched.

    Args:
        report: What is drawn.
        path: An SVG or PNG.
        labels: For each rank of prefill and of decode, what it is called.
    """
    patches: Any = importlib.import_module("matplotlib.patches")
    placed, left, right = ribbons(report)
    colours = {total.component: f"C{number % 10}" for number, total in enumerate(report.totals)}
    rows = max(len(left), len(right), len(colours), 6)
    with drawing(path, (9.0, 1.2 + ROW_INCHES * rows)) as figure:
        panel = figure.subplots()
        for ribbon in placed:
            panel.add_patch(_patch(ribbon, colours[ribbon.flow.component]))
        for boxes, at, names, align in ((left, LEFT, labels[0], "right"), (right, RIGHT, labels[1], "left")):
            ranks = {rank.rank: rank for rank in (report.prefill if at == LEFT else report.decode)}
            for number, (top, bottom) in boxes.items():
                x = at - WIDTH if at == LEFT else at
                panel.add_patch(patches.Rectangle((x, top), WIDTH, bottom - top, color="0.25", linewidth=0.5))
                where = x - 0.01 if at == LEFT else x + WIDTH + 0.01
                text = f"{names[number]}  {size(ranks[number].nbytes)}"
                panel.text(where, (top + bottom) / 2, text, ha=align, va="center", fontsize=8)
        panel.text(LEFT, -0.06, "prefill", ha="right", fontsize=9, fontweight="bold")
        panel.text(RIGHT, -0.06, "decode", ha="left", fontsize=9, fontweight="bold")
        keys = [
            patches.Patch(color=colours[each.component], label=f"{each.component}  {size(each.nbytes)}", alpha=0.6)
            for each in report.totals
        ]
        if any(flow.mark for flow in report.flows):
            keys.append(patches.Patch(facecolor="none", edgecolor="0.3", hatch=HATCH, label="small blocks"))
        panel.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4, fontsize=8, frameon=False)
        held = f", of which decode holds {report.prefix:,}" if report.prefix else ""
        panel.set_title(f"{report.model}: {report.tokens:,} tokens{held}, {size(report.nbytes)}", fontsize=10)
        panel.set_xlim(-0.3, 1.3)
        panel.set_ylim(1 + GAP + 0.05, -0.1)
        panel.axis("off")


def _patch(ribbon: Ribbon, colour: str) -> Any:
    paths: Any = importlib.import_module("matplotlib.path")
    patches: Any = importlib.import_module("matplotlib.patches")
    middle, move, line, curve = (LEFT + RIGHT) / 2, paths.Path.MOVETO, paths.Path.LINETO, paths.Path.CURVE4
    top, end = ribbon.source, ribbon.target
    low, last = top + ribbon.height, end + ribbon.height
    points = [
        (LEFT, top), (middle, top), (middle, end), (RIGHT, end),
        (RIGHT, last), (middle, last), (middle, low), (LEFT, low), (LEFT, top),
    ]  # fmt: skip
    codes = [move, curve, curve, curve, line, curve, curve, curve, paths.Path.CLOSEPOLY]
    hatch = HATCH if ribbon.flow.mark else None
    edge = "0.3" if ribbon.flow.mark else colour
    return patches.PathPatch(
        paths.Path(points, codes), facecolor=colour, edgecolor=edge, linewidth=0.3, alpha=0.6, hatch=hatch
    )
