"""What the pages of the documentation tell a reader to type, for the parsers of the engines and of the adapters."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import zmq

__all__ = ["DOCS", "commands", "objects", "with_keys"]

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands(page: str, program: str) -> list[list[str]]:
    """The words after ``program`` of each command of a shell on a page that begins with it."""
    shown = "\n".join(re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE))
    lines = re.findall(r"(?:'[^']*'|[^\n'])+", shown.replace("\\\n", " "))  # a line in quotes does not end a command
    return [shlex.split(line)[len(program.split()) :] for line in lines if line.startswith(f"{program} ")]


def objects(page: str, before: str) -> list[dict[str, Any]]:
    """Each object in JSON on a page that follows a pattern. A pod's address stands for the variable of it."""
    text = (DOCS / page).read_text().replace("$(POD_IP)", "10.0.0.4")
    return [json.JSONDecoder().raw_decode(text, place.end())[0] for place in re.finditer(before, text)]


def with_keys(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A configuration of a link in which the files of its keys, if it names any, are ones in a folder."""
    if "keys" not in given:
        return given
    for name, key in zip(("allow_file", "secret_file"), zmq.curve_keypair(), strict=True):
        file = folder / name
        file.touch(mode=0o600)
        file.write_text(key.decode())
    return {**given, "keys": {name: str(folder / name) for name in given["keys"]}}
