"""The tables of what moves over what, docs/matrix.md, made from the conformance kit's reports.

``python -m tools.matrix REPORT`` says whether the page is what the reports say; ``--write`` makes it so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from statelink_conformance.report import Report

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "matrix.md"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"
RANK = {"real": 2, "simulator": 1, "not run": 0}


def backends() -> list[str]:
    """The columns: every backend of this repository."""
    known = json.loads((ROOT / "core/src/statelink/registry/known.json").read_text())["statelink.backends"]
    first = ["tcp", "nixl", "mooncake"]
    return [*first, *(name for name in known if name not in first)]


def render(reports: Iterable[Report]) -> str:
    """The tables; a state type that a backend's report does not have was not run.

    The second one has what moved the bytes, of the runs that say so.
    """
    found: dict[tuple[str, str, str], str] = {}
    moved: dict[str, dict[str, None]] = {}
    for report in reports:
        for run in report.runs:
            if run.states and run.moved_by:
                moved.setdefault(run.backend, {})[run.moved_by] = None
            for each in run.states:
                key = (each.type, run.backend, each.topology)
                found[key] = max(found.get(key, "not run"), each.how, key=lambda how: RANK[how])
    types = list(dict.fromkeys(type for type, _, _ in found))
    topologies = list(dict.fromkeys(topology for _, _, topology in found))
    columns = backends()
    lines = [f"| state type | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for type in types:
        cells = [cell({where: found.get((type, name, where), "not run") for where in topologies}) for name in columns]
        kind, _, layout = type.partition(", ")
        lines.append(f"| `{kind}`{', ' + layout if layout else ''} | {' | '.join(cells)} |")
    lines += ["", "| backend | what moved the bytes |", "|---|---|"]
    lines += [f"| {name} | {'; '.join(sorted(moved[name]))} |" for name in columns if name in moved]
    return "\n".join(lines) + "\n"


def cell(found: dict[str, str]) -> str:
    """One cell: what holds for every topology, or what holds for which."""
    by_how: dict[str, list[str]] = {}
    for topology, how in found.items():
        by_how.setdefault(how, []).append(topology)
    if len(by_how) == 1:
        return next(iter(by_how))
    return "; ".join(
        f"{how}: {', '.join(each)}" for how, each in sorted(by_how.items(), key=lambda item: -RANK[item[0]])
    )


def parts(text: str) -> tuple[str, str, str]:
    """What is before the table, the table, and what is after it."""
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    return before + BEGIN, table.strip("\n") + "\n", END + after


def main() -> int:
    """Compare or write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    table = render(msgspec.json.decode(path.read_bytes(), type=Report) for path in given.reports)
    before, present, after = parts(given.page.read_text())
    if given.write:
        given.page.write_text(f"{before}\n{table}\n{after}")
        return 0
    if present != table:
        print("the table of docs/matrix.md is stale: `make test` and then `make matrix` write it anew", file=sys.stderr)
        lines = zip(present.splitlines(), table.splitlines(), strict=False)
        for old, new in [pair for pair in lines if pair[0] != pair[1]][:10]:
            print(f"- {old}\n+ {new}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
