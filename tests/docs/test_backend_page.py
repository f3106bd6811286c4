"""The page about the contract of backends lists every field that one declares, and every optional method."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import statelink.backend as sdk

PAGE = (Path(__file__).parents[2] / "docs" / "backend.md").read_text()
PROTOCOLS = (sdk.Transports, sdk.MemoryKinds, sdk.Diagnosing, sdk.RawTransfers, sdk.EventDriven, sdk.Landing)


def test_every_field_of_a_declaration_is_there_with_its_default() -> None:
    part = PAGE.partition("## What a backend declares")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\| .+ \|$", part, re.MULTILINE)
    fields = []
    for field in dataclasses.fields(sdk.Capabilities):
        default = "ANY" if field.default == sdk.ANY else repr(field.default)
        fields.append((field.name, "" if field.default is dataclasses.MISSING else default))
    assert rows == fields


def test_every_optional_method_is_there_with_its_kind() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)\((.*)\)` \| (class method|method) \| `(.*)` \|$", PAGE, re.MULTILINE)
    methods = []
    for protocol in PROTOCOLS:
        for name, value in vars(protocol).items():
            if not name.startswith("_"):
                kind = "class method" if isinstance(value, classmethod) else "method"
                signature = inspect.signature(getattr(protocol, name))
                names = ", ".join(each for each in signature.parameters if each != "self")
                methods.append((protocol.__name__, name, names, kind, signature.return_annotation))
    assert rows == methods
