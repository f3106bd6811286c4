"""The adapter's own files: none needs another one that needs it, not even for a type."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import statelink_sglang

pytestmark = pytest.mark.smoke


def _needed(file: Path) -> set[str]:
    """The other files of the adapter that a file names, also those that only a type checker reads."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom) and node.level]
    return {name for node in nodes for name in ([node.module] if node.module else [each.name for each in node.names])}


def test_there_is_no_circle_of_files() -> None:
    folder = Path(next(iter(statelink_sglang.__path__)))
    needed = {file.stem: _needed(file) for file in folder.glob("*.py")}
    assert sum(map(len, needed.values())) > 30
    while free := {name for name, others in needed.items() if not others & needed.keys()}:
        needed = {name: others for name, others in needed.items() if name not in free}
    assert needed == {}, "these files need each other"
