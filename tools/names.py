"""Finds names that stand for two things, and constants of time that do not say their unit.

``python -m tools.names PACKAGE...`` looks at every Python file of these packages. The subsystems of a package are the
folders in it, each with all that is below; its own modules are one more. In a subsystem

- no two classes have one name;
- no two constants with numbers have one name and different numbers;
- a constant whose docstring begins with "Seconds" or "Milliseconds" has a name that ends with ``_SECONDS`` or ``_MS``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNITS = {"Seconds": "SECONDS", "Milliseconds": "MS"}
"""First words of docstrings, and how the names of such constants end."""


class Named(NamedTuple):
    """A class, or a constant, of a module.

    Attributes:
        name: Its name.
        line: Where it begins.
        value: A constant's expression; empty for a class.
        says: A constant's docstring.
    """

    name: str
    line: int
    value: str
    says: str


def defined(text: str) -> Iterator[Named]:
    """The classes of a module, and its constants that are numbers."""
    body = ast.parse(text).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef):
            yield Named(node.name, node.lineno, "", "")
            continue
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or not _is_number(node.value):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id.isupper():
            spoken = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            says = str(after.value.value) if spoken else ""  # type: ignore[union-attr]
            yield Named(target.id, node.lineno, ast.unparse(node.value), says)


def _is_number(value: ast.expr) -> bool:
    """Whether an expression has numbers and operators alone."""
    parts = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
    whole = list(ast.walk(value))
    literals = [part.value for part in whole if isinstance(part, ast.Constant)]
    return all(isinstance(part, parts) for part in whole) and all(type(each) in (int, float) for each in literals)


def faults(package: Path) -> Iterator[str]:
    """Each fault of a package, as a line."""
    classes: dict[tuple[str, str], str] = {}
    numbers: dict[tuple[str, str], tuple[str, str]] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        subsystem = inside[0] if len(inside) > 1 else ""
        for each in defined(path.read_text()):
            where, key = f"{path}:{each.line}", (subsystem, each.name)
            if not each.value:
                if key in classes:
                    yield f"{where}: a class {each.name!r} is also at {classes[key]}"
                classes.setdefault(key, where)
                continue
            first, value = numbers.setdefault(key, (where, each.value))
            if value != each.value:
                yield f"{where}: {each.name} is {each.value}, and {value} at {first}"
            unit = UNITS.get(each.says.partition(" ")[0])
            if unit and each.name.rpartition("_")[2] != unit:
                yield f"{where}: {each.name} is a time, and its name does not end with {unit}"


def main() -> int:
    """Print each fault; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, nargs="+", metavar="PACKAGE")
    packages = parser.parse_args().packages
    lines = [line for package in packages for line in faults(package)]
    print("\n".join(lines), end="\n" if lines else "")
    empty = [str(package) for package in packages if not any(package.rglob("*.py"))]
    if empty:
        print(f"error: there is no Python file in {', '.join(empty)}", file=sys.stderr)
    return 1 if lines or empty else 0


if __name__ == "__main__":
    sys.exit(main())
