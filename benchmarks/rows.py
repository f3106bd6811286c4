"""How a benchmark prints what it measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["show"]


def show(row: Mapping[str, Any], as_json: bool = False) -> None:
    """Print one row, as words or as JSON."""
    print(json.dumps(row) if as_json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
