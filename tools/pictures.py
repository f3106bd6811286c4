"""The pictures of docs/design.md: the layers by the import rules, and a room's life.

``python -m tools.pictures`` writes them. With ``--check`` it writes nothing, and fails if a picture is out of date,
or if the table of layers in docs/design.md has another order than the import rules.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.svg import drawing, label

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DESIGN = DOCS / "design.md"
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<text>[^|]+) \|", re.MULTILINE)
UNION = re.compile(r"[|:]")
"""What stands between the modules of one layer in an import rule."""


# The layers.

WIDTH, GAP, LINE = 860, 8, 16


def rules() -> list[dict[str, Any]]:
    """The import rules."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = given["tool"]["importlinter"]["contracts"]
    return found


def layers(rule: dict[str, Any]) -> list[list[str]]:
    """The modules of each layer, highest layer first."""
    return [[name.strip(" ()") for name in UNION.split(each)] for each in rule["layers"]]


def described() -> dict[str, str]:
    """What the table of docs/design.md says of each module, in its order: lowest layer first."""
    table = DESIGN.read_text().partition("## The layers")[2].partition("\n## ")[0]
    return {row["name"]: row["text"].replace("`", "") for row in ROW.finditer(table)}


def draw_layers() -> str:
    """Each rule about layers as a column of rows; beside the first, what may import only some modules."""
    texts = described()
    shapes: list[str] = []
    top = GAP
    for rule in (each for each in rules() if each["type"] == "layers"):
        where = ", ".join(rule["containers"])
        shapes.append(label(GAP, top + LINE, f"{where}: each row imports only from the rows below it", "faint"))
        top += 2 * LINE
        for row in layers(rule):
            width = (WIDTH - GAP * (len(row) + 1)) / len(row)
            lines = {name: textwrap.wrap(texts.get(name, ""), int(width / 6.5)) for name in row}
            height = 26 + LINE * max(map(len, lines.values()))
            for number, name in enumerate(row):
                x = GAP + number * (width + GAP)
                shapes.append(f'<rect class="box" x="{x:g}" y="{top}" width="{width:g}" height="{height}" rx="5"/>')
                shapes.append(label(x + 10, top + 18, name, "name"))
                shapes += [label(x + 10, top + 36 + LINE * n, each, "faint") for n, each in enumerate(lines[name])]
            top += height + GAP
        top += GAP
    for rule in (each for each in rules() if each["type"] == "only"):
        who = ", ".join(name.removeprefix("statelink.") for name in rule["source_modules"])
        text = f"{who}: from the core, import only {', '.join(rule['allowed_modules'])}"
        for line in textwrap.wrap(text, 125):
            top += LINE
            shapes.append(label(GAP, top, line, "faint"))
        top += GAP
    return drawing(WIDTH, top + GAP, "The layers of the core, and what each may import", shapes)


# One room.


class Step(NamedTuple):
    """Something that happens to the room: one thread tells another, or works alone where both are the same."""

    source: str
    target: str
    text: str
    kind: str = ""


LANES = {
    "dc": ("decode", "caller's thread"),
    "dl": ("decode", "control thread"),
    "dd": ("decode", "data threads"),
    "m": ("memory", "of decode"),
    "pd": ("prefill", "data threads"),
    "pl": ("prefill", "control thread"),
    "pc": ("prefill", "caller's thread"),
}
STEPS = [
    Step("dc", "dl", "receive(room)"),
    Step("", "", "Once for each pair of instances"),
    Step("dl", "pl", "Hello: decode's handshake"),
    Step("pl", "dl", "Welcome: prefill's handshake"),
    Step("dl", "dd", "match, route, compile, connect"),
    Step("dl", "pl", "Attach: what this rank writes, and a digest of the plan"),
    Step("pl", "pd", "compile, connect"),
    Step("pl", "dl", "Attached: the digest is equal"),
    Step("dl", "dl", "status: waiting"),
    Step("", "", "For each room"),
    Step("dc", "dl", "accept(items)"),
    Step("dl", "dd", "prepare hooks, grant memory"),
    Step("dl", "pl", "Request: tokens, prefix, items, generation"),
    Step("pc", "pl", "send(room): before or after"),
    Step("pl", "pl", "status: waiting"),
    Step("", "", "For each push"),
    Step("pc", "pl", "push(pages)"),
    Step("pl", "pl", "status: transferring"),
    Step("pl", "pd", "plan, send hooks, submit"),
    Step("pd", "m", "the bytes: in flight", "bytes"),
    Step("pd", "pl", "completion"),
    Step("pl", "dl", "Chunk: granules, layers, bytes"),
    Step("", "", "After the last push"),
    Step("pl", "dl", "Finished: bytes for each component, digests"),
    Step("dl", "dd", "receive hooks, verify"),
    Step("dd", "dl", "complete"),
    Step("dl", "dl", "status: succeeded, quiesced"),
    Step("dl", "pl", "Received"),
    Step("pl", "pl", "status: succeeded, quiesced"),
]
PITCH, STEP, HEAD = 150, 30, 56


def _steps(at: dict[str, float]) -> Iterator[str]:
    y = float(HEAD)
    last = max(at.values()) + PITCH / 2
    for source, target, text, kind in STEPS:
        y += STEP
        if not source:
            yield f'<line x1="{GAP}" x2="{last:g}" y1="{y - 4:g}" y2="{y - 4:g}" stroke-dasharray="2 4"/>'
            yield f'<rect class="paper" x="{GAP}" y="{y:g}" width="{7.5 * len(text):g}" height="13"/>'
            yield label(GAP, y + 12, text, "faint name")
            y += 8
            continue
        x1, x2 = at[source], at[target]
        kind = kind or LANES[source][0]
        if source == target:
            width = 7.2 * len(text) + 16
            yield f'<rect class="box" x="{x1 - width / 2:g}" y="{y - 15:g}" width="{width:g}" height="22" rx="11"/>'
            yield label(x1, y, text, "mid " + kind)
            continue
        tip = 8 if x2 > x1 else -8
        end = x2 - tip / 4  # so that a thick line does not hide its tip
        yield f'<path class="{kind}" d="M{x1:g} {y:g} H{end:g} m{-tip} -5 l{tip} 5 l{-tip} 5"/>'
        middle, width = (x1 + x2) / 2, 6.6 * len(text) + 8
        # Behind the words, so that no line goes through them.
        yield f'<rect class="paper" x="{middle - width / 2:g}" y="{y - 18:g}" width="{width:g}" height="13"/>'
        yield label(middle, y - 6, text, "mid")


def draw_room() -> str:
    """The threads of both sides, and who tells whom what, from top to bottom."""
    at = {name: PITCH * (number + 0.5) for number, name in enumerate(LANES)}
    dividers = sum(not step.source for step in STEPS)
    height = HEAD + STEP * (len(STEPS) + 1) + 8 * dividers
    shapes = []
    for name, (side, thread) in LANES.items():
        shapes.append(label(at[name], 20, side, f"mid name {side}"))
        shapes.append(label(at[name], 38, thread, "mid faint"))
        shapes.append(f'<line x1="{at[name]:g}" x2="{at[name]:g}" y1="46" y2="{height - 10}"/>')
    return drawing(PITCH * len(LANES), height, "One room's life, on both sides", [*shapes, *_steps(at)])


PICTURES = {"layers.svg": draw_layers, "room.svg": draw_room}


def defects() -> Iterator[str]:
    """What is out of date."""
    for name, draw in PICTURES.items():
        path = DOCS / name
        if not path.exists() or path.read_text() != draw():
            yield f"docs/{name} is out of date: run 'python -m tools.pictures'"
    (rule,) = (each for each in rules() if each["type"] == "layers" and each["containers"] == ["statelink"])
    rest = list(described())
    for row in reversed(layers(rule)):
        if sorted(rest[: len(row)]) != sorted(row):
            yield f"docs/design.md lists {rest[: len(row)]} where the import rules have the layer {row}"
            return
        rest = rest[len(row) :]
    beside = [name for each in rules() if each["type"] == "only" for name in each["source_modules"]]
    unknown = [name for name in rest if f"statelink.{name}" not in beside]
    if unknown:
        yield f"docs/design.md lists {unknown}, which no import rule names"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    if not parser.parse_args().check:
        for name, draw in PICTURES.items():
            (DOCS / name).write_text(draw())
    found = list(defects())
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
