"""Writes what MoRI's shared objects want of libraries that are not here: ``symbols.py PACKAGE FOLDER``.

``FOLDER/stubs.c`` defines every symbol that no object of the package and no library of the system defines: functions
that return zero, and empty objects. They are weak, so the functions of the other sources take precedence.
``FOLDER/stubs.map`` gives each the version under which it is looked up. ``FOLDER/names`` lists the names of the absent
libraries. The standard library and binutils are enough for this.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LOADED_LATER = ("libibverbs.so.1", "libibverbs.so", "librocm_smi64.so.1", "librocm_smi64.so")
"""Libraries that MoRI opens by name after it has started: all that it does with them is done by the stand-in."""


class Symbol(NamedTuple):
    """One entry of a dynamic symbol table."""

    name: str
    version: str
    kind: str
    weak: bool
    defined: bool


def symbols(path: str) -> Iterator[Symbol]:
    """The dynamic symbols of an object."""
    table = subprocess.run(["readelf", "--dyn-syms", "--wide", path], capture_output=True, text=True, check=True)
    for line in table.stdout.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            name, _, version = fields[7].partition("@")
            yield Symbol(name, version.lstrip("@"), fields[3], fields[4] == "WEAK", fields[6] != "UND")


def loaded(path: str) -> dict[str, str]:
    """The libraries that the loader loads with an object, by name: where each is, or an empty text."""
    said = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+(\S+) => (not found|\S+)", said, re.MULTILINE)
    return {name: "" if where == "not found" else where for name, where in found}


def main(package: str, folder: Path) -> None:
    """Write the three files."""
    binding = f"{package}/libmori_pybinds.so"
    libraries = loaded(binding)
    absent = {name for name, where in libraries.items() if not where} | set(LOADED_LATER)
    present = [where for name, where in libraries.items() if name not in absent]
    objects = [binding, *(where for where in present if where.startswith(package))]
    have = {each.name for path in (binding, *present) for each in symbols(path) if each.defined}
    wanted = {
        each.name: each
        for path in objects
        for each in symbols(path)
        if not (each.defined or each.weak or each.name in have or each.name.startswith(("Py", "_Py")))
    }
    versions: dict[str, list[str]] = {}
    for each in wanted.values():
        versions.setdefault(each.version, []).append(each.name)
    # Of C++ classes, tables and type names are data, also where the object that uses them does not say so.
    lines = [
        f"__attribute__((weak, aligned(64))) char {name}[1024];"
        if each.kind == "OBJECT" or name.startswith(("_ZTV", "_ZTI", "_ZTS", "_ZTT"))
        else f"__attribute__((weak)) long {name}(void) {{ return 0; }}"
        for name, each in sorted(wanted.items())
    ]
    (folder / "stubs.c").write_text("\n".join(lines) + "\n")
    blocks = [
        f"{version} {{ global: {'; '.join(sorted(each))}; }};" for version, each in sorted(versions.items()) if version
    ]
    (folder / "stubs.map").write_text("\n".join(blocks) + "\n")
    (folder / "names").write_text("\n".join(sorted(absent)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
