"""Packages that only bring hooks: each is loaded by itself, and what it brings counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from .sites import Site

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
from statelink import hookimpl
from statelink.state import Coverage, IndexSpace, StateType

@hookimpl
def statelink_state_types():
    return [StateType(name="vendor_ring", index=IndexSpace.SLOT, coverage=Coverage.REQUEST)]
"""

FAILING = {
    "import": ("import does_not_exist", "ModuleNotFoundError: No module named 'does_not_exist'"),
    "exits": ("import sys; sys.exit(4)", "SystemExit: 4"),
    "misspelt": (
        "from statelink import hookimpl\n@hookimpl\ndef statelink_stratgy(backend): ...",
        "PluginValidationError: unknown hook 'statelink_stratgy'",
    ),
    "argument": (
        "from statelink import hookimpl\n@hookimpl\ndef statelink_strategy(backend, state_kind): ...",
        "PluginValidationError",
    ),
    "taken": (
        GOOD.replace("vendor_ring", "kv"),
        "StateError: state type name 'kv' is taken: it belongs to type 'kv' with another definition",
    ),
    "raises": (
        "from statelink import hookimpl\n@hookimpl\ndef statelink_state_types(): raise KeyError('vendor')",
        "KeyError: 'vendor'",
    ),
    "types": (
        "from statelink import hookimpl\n@hookimpl\ndef statelink_state_types(): return [5]",
        "StateError: 5 is not a StateType",
    ),
}

LOAD = """
import json
from statelink.registry import plugin_failures, plugin_manager
from statelink.state import state_types
manager = plugin_manager()
assert plugin_manager() is manager
print(json.dumps({
    "plugins": sorted(name for name, _ in manager.list_name_plugin()),
    "failures": [list(each) for each in plugin_failures()],
    "types": [each.name for each in state_types()],
}))
"""


@pytest.fixture(name="site")
def site_fixture(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


def plugin(site: Site, name: str, source: str) -> None:
    site.package(f"vendor-{name}", statelink_plugins={name: f"vendor_{name}"})
    site.module(f"vendor_{name}", source)


def loaded(site: Site, **environment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(site.python(LOAD, environment=environment).splitlines()[-1])
    return found


def test_each_package_is_loaded_by_itself_and_each_failure_is_kept(site: Site) -> None:
    for name, (source, _) in FAILING.items():
        plugin(site, name, source)
    # Loaded first, in the middle and last: no failure stops those after it.
    for name in ("agood", "mgood", "zgood"):
        plugin(site, name, GOOD.replace("vendor_ring", f"vendor_{name}_ring"))
    found = loaded(site)
    assert found["plugins"] == ["agood", "mgood", "zgood"]
    assert {"vendor_agood_ring", "vendor_mgood_ring", "vendor_zgood_ring", "kv"} <= set(found["types"])
    reasons = {name: (distribution, reason) for name, distribution, reason in found["failures"]}
    assert len(found["failures"]) == len(reasons) == len(FAILING)
    for name, (_, reason) in FAILING.items():
        assert reasons[name][0] == f"vendor-{name}"
        assert reasons[name][1].startswith(reason), reasons[name]


@pytest.mark.parametrize("name", FAILING)
def test_strict_mode_raises_what_the_package_raised(site: Site, name: str) -> None:
    source, reason = FAILING[name]
    plugin(site, name, source)
    code = """
    from statelink.registry import plugin_manager
    try:
        plugin_manager()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
    """
    printed = site.python(code, environment={"STATELINK_STRICT_PLUGINS": "1"})
    kind, _, said = reason.partition(": ")
    assert printed.startswith(kind)
    assert said in printed  # pluggy's message has a line about the module before that
    assert loaded(site, STATELINK_STRICT_PLUGINS="0")["plugins"] == []


def test_the_environment_names_the_packages_that_count(site: Site) -> None:
    plugin(site, "good", GOOD)
    plugin(site, "broken", "import does_not_exist")
    assert loaded(site, STATELINK_PLUGINS="vendor_good") == {**loaded(site), "failures": []}
    none = loaded(site, STATELINK_PLUGINS="")
    assert none["plugins"] == none["failures"] == []
    assert "vendor_ring" not in none["types"]


def test_hook_calls_can_be_traced(site: Site) -> None:
    plugin(site, "good", GOOD)
    code = "import logging; logging.basicConfig(level=logging.INFO)\n" + LOAD
    calls = code + "manager.hook.statelink_strategy(backend='tcp', state_type='kv')\n"
    assert "statelink_strategy" in site.python(calls, environment={"STATELINK_TRACE_PLUGINS": "1"})
    assert "statelink_strategy" not in site.python(calls)


OPEN = """
import numpy as np
import msgspec
import statelink
from statelink import state
from statelink.errors import StatelinkError

def inventory(name, rows, kind):
    made = state.aux_rows({"row": rows}, name="ring")
    made = made._replace(component=msgspec.structs.replace(made.component, type=kind))
    return state.describe(name, [made])

rows = np.arange(64, dtype=np.uint8).reshape(4, 16), np.full((3, 16), 255, np.uint8)
"""

VENDOR = """
from statelink import hookimpl
from statelink.backend import DIRECT
from statelink.state import Coverage, IndexSpace, StateType

@hookimpl
def statelink_state_types():
    return [StateType(name="vendor_ring", index=IndexSpace.SLOT, coverage=Coverage.REQUEST, aliases=("vring",))]

@hookimpl
def statelink_strategy(backend, state_type):
    return DIRECT if (backend, state_type) == ("tcp", "vendor_ring") else None
"""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            VENDOR.replace("return DIRECT if", "return 'direct' if"),
            "the strategy for state type 'vendor_ring' over backend 'tcp' is not a Strategy: got 'direct'",
        ),
        (
            VENDOR.replace("return DIRECT if", "raise KeyError('vendor')\n    return DIRECT if"),
            "KeyError: 'vendor'",
        ),
    ],
)
def test_a_strategy_hook_that_fails_is_a_typed_error_of_open(site: Site, source: str, text: str) -> None:
    plugin(site, "vendor", source)
    code = f"""{OPEN}
try:
    statelink.open({{"role": "prefill", "backend": "tcp"}}, inventory("p", rows[0], "vendor_ring"))
except StatelinkError as error:
    print(error)
"""
    assert text in site.python(code)


def test_an_override_brings_a_type_that_the_backend_does_not_declare(site: Site) -> None:
    plugin(site, "vendor", VENDOR.replace('"tcp"', '"narrow"'))
    site.backend("narrow")
    text = (site.folder / "statelink_narrow.py").read_text()
    site.module("statelink_narrow", text.replace("state_types=ANY", 'state_types=frozenset({"kv"})'))
    code = f"""{OPEN}
for kind in ("vendor_ring", "aux"):
    try:
        statelink.open({{"role": "prefill", "backend": "narrow"}}, inventory("p", rows[0], kind)).close()
        print(kind, "opened")
    except StatelinkError as error:
        print(type(error).__name__, error)
"""
    assert site.python(code).splitlines() == [
        "vendor_ring opened",
        "UnsupportedError backend 'narrow' does not move state type 'aux' (component ring, instance p, rank 0): "
        "it declares kv",
        "hint: use another backend, or install a package that brings a strategy for this type",
    ]
