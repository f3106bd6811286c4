"""How often the code of a package reaches into objects that are not its own.

``python -m tools.reaches FOLDER [--most PERCENT]`` counts attribute accesses. One *reaches in* if it reads a private
attribute of another object than ``self`` or ``cls``, or if it assigns to or deletes any attribute of another object,
public or private. A name that is imported from a module is no object here, and neither is the class around a method.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OWN = frozenset({"self", "cls"})


class Reach(NamedTuple):
    """One access that reaches in."""

    path: Path
    line: int
    text: str


class Reaches(ast.NodeVisitor):
    """Counts the accesses of one module.

    Attributes:
        accesses: All attribute accesses.
        found: Those that reach in.
    """

    def __init__(self, path: Path) -> None:
        self.accesses = 0
        self.found: list[Reach] = []
        self._path = path
        self._classes: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.accesses += 1
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        private = node.attr.startswith("_") and not node.attr.endswith("__")
        if owner not in OWN and owner not in self._classes and (private or not isinstance(node.ctx, ast.Load)):
            self.found.append(Reach(self._path, node.lineno, ast.unparse(node)))
        self.generic_visit(node)


def modules(folder: Path) -> Iterator[Reaches]:
    """The counts of every module in a folder and below."""
    for path in sorted(folder.rglob("*.py")):
        reaches = Reaches(path)
        reaches.visit(ast.parse(path.read_text(), str(path)))
        yield reaches


def main() -> int:
    """Print the accesses that reach in, and their share; 1 if it is above ``--most``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=float, default=100.0, help="the largest share that is allowed, in percent")
    parser.add_argument("--quiet", action="store_true", help="print only the share")
    given = parser.parse_args()
    counted = list(modules(given.folder))
    accesses = sum(each.accesses for each in counted)
    found = [reach for each in counted for reach in each.found]
    share = 100 * len(found) / max(accesses, 1)
    if not given.quiet:
        for reach in found:
            print(f"{reach.path}:{reach.line}: {reach.text}")
    print(f"{given.folder}: {len(found)} of {accesses} attribute accesses reach in: {share:.2f} %")
    if share > given.most:
        print(f"error: at most {given.most} % are allowed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
