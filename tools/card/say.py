"""How a part says what it found: one line of JSON for each answer, into a file that the runner reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["FILE", "answer"]

FILE = "STATELINK_GPU_ANSWERS"
"""The variable of the environment that names the file. Libraries print between the answers on standard output."""


def answer(what: str, value: Any, unit: str = "") -> None:
    """Say one answer: a number with its unit, or plain words."""
    line = json.dumps({"what": what, "value": value, "unit": unit})
    print(line, flush=True)
    path = os.environ.get(FILE)
    if path:
        with Path(path).open("a") as file:
            file.write(line + "\n")
