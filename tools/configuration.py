"""Writes docs/configuration.md, every key of a link's configuration: ``python -m tools.configuration``.

The page is made from the fields of `LinkConfig` and of its tables, and from what their docstrings say of them.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from statelink.config import LinkConfig, Staging
from statelink.tcp import TcpBackend
from statelink.wire import ENVIRONMENT, Keys

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
INTRO = """\
# Every key of the configuration

`python -m tools.configuration` writes this page from `LinkConfig`. A configuration is a mapping that the engine passes,
a TOML or JSON file, or the environment: [which of them counts](engine.md#files-and-the-environment). An adapter takes
the same keys from its engine: [SGLang](sglang.md#configure), [vLLM](vllm.md#configure). [Settings that
matter](production.md#settings-that-matter) says which to change, and when.

A variable holds JSON, with two exceptions: a text or a word is written as it is, and a list of texts may have commas or
blanks between them. A table in a variable is a JSON object.
"""
TCP = """\
## The options of the backend `tcp`

With `backend = "tcp"` they stand in `options`; with `auto`, in the table `tcp` of `options`. Times are in seconds,
sizes in bytes. The README of each plugin has the options of its backend.
"""
TABLES: dict[str, type[msgspec.Struct]] = {"keys": Keys, "staging": Staging}
VARIABLES = {field: variable for variable, field in ENVIRONMENT.items()}
"""Key of the table ``keys`` to the variable that stands for it."""


def render() -> str:
    """The page."""
    lines = [INTRO, *_table(LinkConfig, _variable)]
    for name, kind in TABLES.items():
        lines += ["", f"## The table `{name}`", ""]
        if name == "keys":
            lines += list(_table(kind, lambda key: f"`{VARIABLES[key]}`"))
        else:
            lines += [f"`STATELINK_{name.upper()}` holds the whole table.", "", *_table(kind, None)]
    lines += ["", TCP, *_table(TcpBackend.Options, None)]
    return "\n".join(lines) + "\n"


def _variable(key: str) -> str:
    return f"[below](#the-table-{key})" if key == "keys" else f"`STATELINK_{key.upper()}`"


def _table(kind: type[msgspec.Struct], variable: Callable[[str], str] | None) -> Iterator[str]:
    """A row for each key, in the order of the fields; without a column of variables if they have none."""
    said = _said(kind)
    head = ["key", "type", "default", *(["variable"] if variable else []), "meaning"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for field in msgspec.structs.fields(kind):
        key = field.encode_name
        cells = [f"`{key}`", _type(key, field.type), _default(field)]
        yield f"| {' | '.join([*cells, *([variable(key)] if variable else []), said[field.name]])} |"


def _said(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What the section ``Attributes`` of a docstring says of each field."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.replace("``", "`").split()).replace("|", "\\|") for name, text in found}


def _type(key: str, given: Any) -> str:
    """A field's type, in the words of TOML and JSON."""
    parts = [each for each in get_args(given) if each is not type(None)]
    if get_origin(given) in (Union, types.UnionType):
        return " or ".join(_type(key, each) for each in parts)
    if get_origin(given) is Literal:
        return " or ".join(f"`{word}`" for word in parts)
    if get_origin(given) is tuple:
        return "list of texts"
    if get_origin(given) is dict:
        return "table"
    if isinstance(given, type) and issubclass(given, msgspec.Struct):
        return f"[table](#the-table-{key})"
    return {str: "text", bool: "`true` or `false`", int: "whole number", float: "number"}[given]


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 20 and not value % (1 << 20):
        return f"`{value}` ({value >> 20} MiB)" if field.name.endswith("bytes") else f"`{value}`"
    if isinstance(value, (int, float)):
        return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
    return f"`{value}`" if value else "empty"


if __name__ == "__main__":
    PAGE.write_text(render())
