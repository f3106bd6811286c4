"""How a benchmark shows what it measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["drawn", "show", "table"]


def show(row: Mapping[str, Any], as_json: bool = False) -> None:
    """Print one row, as words or as JSON."""
    print(json.dumps(row) if as_json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def drawn(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as a table of markdown."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same of rows that name their cells."""
    return drawn(list(rows[0]), (list(row.values()) for row in rows))
