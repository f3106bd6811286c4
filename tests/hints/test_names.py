"""Every function and command that a hint names exists, as does every one in the table of error codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

import statelink
import statelink.backend
import statelink.state
import statelink.testing
import statelink_conformance
from statelink.cli import main

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for part in ("core", "plugins", "adapters") for path in ROOT.glob(f"{part}/**/src/**/*.py"))
THEIRS = {"query"}
"""Functions of libraries and engines."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text but the documentation and programs, with its parts in braces left out."""
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in documentation else None
        if isinstance(text, str) and "import " not in text:
            yield text


TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
MODULES = (statelink, statelink.backend, statelink.errors, statelink.state, statelink.testing, statelink_conformance)
PUBLIC = {name: getattr(module, name) for module in MODULES for name in module.__all__}
DEFINED = {*PUBLIC, *(name for each in PUBLIC.values() if isinstance(each, type) for name in dir(each))}
"""What an engine or a plugin may call."""
SAID = [
    *((path.name, text) for path, tree in TREES.items() for text in texts(tree)),
    *(("errors.md", line) for line in (ROOT / "docs" / "errors.md").read_text().splitlines()),
]


def test_functions() -> None:
    named = {(place, name) for place, text in SAID for name in re.findall(r"(?<![\w.])(\w+)\(\)", text)}
    assert len(named) > 20
    assert sorted(each for each in named if each[1] not in DEFINED | THEIRS) == []


def test_commands() -> None:
    assert isinstance(main, click.Group)
    named = {(place, name) for place, text in SAID for name in re.findall(r"`statelink ([a-z-]+)", text)}
    assert len(named) > 5
    known = main.list_commands(click.Context(main))
    assert sorted(each for each in named if each[1] not in known) == []
