"""What the pictures of the documentation share: colours for light and dark, and a few shapes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "faint": "#656d76",
    "line": "#afb8c1",
    "box": "#f3f6f9",
    "decode": "#0969da",
    "prefill": "#8250df",
    "bytes": "#bc4c00",
}
DARK = {
    "paper": "#0d1117",
    "ink": "#e6edf3",
    "faint": "#9198a1",
    "line": "#6e7681",
    "box": "#161b22",
    "decode": "#58a6ff",
    "prefill": "#bc8cff",
    "bytes": "#f0883e",
}


def _colours(of: dict[str, str]) -> str:
    """CSS rules; several viewers of pictures know no variables."""
    rules = [f".paper {{ fill: {of['paper']}; }}", f"text {{ fill: {of['ink']}; }}"]
    rules += [f"text.faint {{ fill: {of['faint']}; }}"]
    rules += [f".box {{ fill: {of['box']}; stroke: {of['line']}; }}", f"line {{ stroke: {of['line']}; }}"]
    for name in ("decode", "prefill", "bytes"):
        rules += [f"text.{name} {{ fill: {of[name]}; }}", f"path.{name} {{ stroke: {of[name]}; }}"]
    return "\n".join(rules)


STYLE = f"""
svg {{ font-family: system-ui, sans-serif; font-size: 13px; }}
.faint {{ font-size: 12px; }}
.name {{ font-weight: 600; }}
.mid {{ text-anchor: middle; }}
path {{ stroke-width: 1.5; fill: none; }}
path.bytes {{ stroke-width: 4; }}
{_colours(LIGHT)}
@media (prefers-color-scheme: dark) {{
{_colours(DARK)}
}}
"""


def drawing(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    """A whole picture."""
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">\n<title>{escape(title)}</title>'
    paper = f'<rect class="paper" width="{width}" height="{height}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *shapes, "</svg>", ""])


def label(x: float, y: float, words: str, kind: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'
