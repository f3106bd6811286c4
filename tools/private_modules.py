"""Finds tests that use a private module of this workspace, by an import or in a text such as a path to patch.

``python -m tools.private_modules FOLDER... [--without PATH]`` looks at every Python file in these folders and below.
A module is private if a part of its name begins with one underscore. Private attributes are for ruff's SLF001.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PRIVATE = re.compile(r"\bstatelink(?:_\w+)?(?:\.\w+)*\._(?!_)\w+")


def names(node: ast.AST) -> Iterator[str]:
    """What a part of a program names: modules and what is imported from them, or a text."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from (f"{node.module}.{each.name}" for each in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        # An import in the text of a program names the module first, as a path does not.
        yield re.sub(r"\bfrom ([\w.]+) import (?=_)", r"\1.", node.value)


def found(path: Path) -> Iterator[str]:
    """Each use of a private module in a file, as a line."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        for name in names(node):
            for match in PRIVATE.finditer(name):
                yield f"{path}:{getattr(node, 'lineno', 0)}: {match.group()} is private"


def main() -> int:
    """Print each use; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--without", type=Path, action="append", default=[], help="leave this file or folder out")
    given = parser.parse_args()
    files = {path for folder in given.folders for path in folder.rglob("*.py")}
    kept = sorted(path for path in files if not any(each in (path, *path.parents) for each in given.without))
    lines = [line for path in kept for line in found(path)]
    print("\n".join(lines), end="\n" if lines else "")
    if not kept:
        print("error: there is no Python file in these folders", file=sys.stderr)
    return 1 if lines or not kept else 0


if __name__ == "__main__":
    sys.exit(main())
