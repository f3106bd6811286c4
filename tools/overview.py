"""The picture of the README: one request between two fleets of different shape, as `statelink explain` plans it."""

from __future__ import annotations

from collections.abc import Sequence

from statelink.explain import Layout, Rank, Side, explain, preset
from tools.svg import drawing, label

TOKENS = 8192
PREFILL = Layout(tp=2, pp=2)
DECODE = Layout(tp=4)
MODEL = "qwen3-next-80b"

WIDTH, TOP, GAP, BOX = 860, 74, 26, 176
HIGHEST = 250
"""Height of all ranks of one side, without the gaps."""
FILLS = {"kv": "#bc4c00", "mamba": "#2da44e"}
NAMES = {"kv": "KV pages", "mamba": "recurrent states"}


def _tops(ranks: Sequence[Rank], each: float) -> dict[int, float]:
    total = sum(rank.nbytes for rank in ranks) * each + GAP * (len(ranks) - 1)
    top, tops = TOP + (HIGHEST + 3 * GAP - total) / 2, {}
    for rank in ranks:
        tops[rank.rank] = top
        top += rank.nbytes * each + GAP
    return tops


def _said(rank: Rank) -> str:
    where = ", ".join(f"{axis} {place}" for axis, place in rank.axes.items())
    return f"rank {rank.rank} ({where})"


def draw_overview() -> str:
    """Ranks of both sides, and a ribbon for what each sends to each; heights are proportional to bytes."""
    report = explain(
        Side(instance="prefill", model=preset(MODEL), layout=PREFILL),
        Side(instance="decode", model=preset(MODEL), layout=DECODE),
        tokens=TOKENS,
    )
    each = HIGHEST / report.nbytes
    left, right = _tops(report.prefill, each), _tops(report.decode, each)
    ends = {("left", at): top for at, top in left.items()} | {("right", at): top for at, top in right.items()}
    x1, x2 = GAP + BOX, WIDTH - GAP - BOX
    bend = (x2 - x1) / 2
    shapes = []
    for flow in report.flows:
        high = flow.nbytes * each
        y1, y2 = ends["left", flow.source], ends["right", flow.target]
        ends["left", flow.source], ends["right", flow.target] = y1 + high, y2 + high
        there = f"M{x1} {y1:.1f} c{bend} 0 {x2 - x1 - bend} {y2 - y1:.1f} {x2 - x1} {y2 - y1:.1f} v{high:.1f}"
        back = f"c{-bend} 0 {x1 - x2 + bend} {y1 - y2:.1f} {x1 - x2} {y1 - y2:.1f} z"
        shapes.append(f'<path d="{there} {back}" style="fill: {FILLS[flow.component]}; opacity: .55"/>')
    for x, ranks, tops, kind in ((GAP, report.prefill, left, "prefill"), (x2, report.decode, right, "decode")):
        for rank in ranks:
            high, y = rank.nbytes * each, tops[rank.rank]
            shapes.append(f'<rect class="box" x="{x}" y="{y:.1f}" width="{BOX}" height="{high:.1f}" rx="4"/>')
            shapes.append(label(x + 10, y + high / 2 - 2, _said(rank), f"name {kind}"))
            shapes.append(label(x + 10, y + high / 2 + 15, f"{rank.nbytes / 2**20:.0f} MiB", "faint"))
    shapes.append(label(GAP, 26, f"prefill: TP {PREFILL.tp}, {PREFILL.pp} pipeline stages", "name prefill"))
    shapes.append(label(x2, 26, f"decode: TP {DECODE.tp}", "name decode"))
    shapes.append(label(WIDTH / 2, 26, f"{MODEL}, {TOKENS:,} tokens", "mid faint"))
    for number, (name, fill) in enumerate(FILLS.items()):
        at = WIDTH / 2 - 130 + 130 * number
        shapes.append(f'<rect x="{at:g}" y="40" width="12" height="12" style="fill: {fill}; opacity: .55"/>')
        shapes.append(label(at + 18, 51, NAMES[name], "faint"))
    height = int(TOP + HIGHEST + 3 * GAP + 20)
    title = f"What one request of {MODEL} moves between two prefill stages of two ranks and four decode ranks"
    return drawing(WIDTH, height, title, shapes)
