"""What is not asked for is not imported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from .sites import Site

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = {
    "opentelemetry",
    "prometheus_client",
    "aiohttp",
    "torch",
    "transformers",
    "nixl",
    "nixl_cu12",
    "nixl_cu13",
    "mooncake",
    "mori",
    "memfabric_hybrid",
    "pytest",
    "_pytest",
    "hypothesis",
    "statelink_nixl",
    "statelink_mooncake",
    "statelink_mori",
    "statelink_ascend",
    "statelink_etcd",
    "statelink_bench",
    "statelink_conformance",
    "statelink_explain",
    "statelink_demo",
}


@pytest.fixture(name="apart")
def apart_fixture(tmp_path: Path) -> Site:
    """Packages that only programs of their own see."""
    return Site(tmp_path / "site")


def imported(site: Site, code: str) -> set[str]:
    printed = site.python(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    return set(json.loads(printed.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    ["statelink", "statelink.state", "statelink.backend", "statelink.errors", "statelink.cli", "statelink.tcp"],
)
def test_importing_the_core_imports_no_plugin_and_no_vendor_library(apart: Site, module: str) -> None:
    modules = imported(apart, f"import {module}")
    assert module in modules
    assert not modules & HEAVY


def test_importing_the_core_imports_no_backend_and_no_program(apart: Site) -> None:
    modules = imported(apart, "import statelink")
    assert not modules & {"statelink.tcp", "statelink.cli", "statelink.testing", "click", "rich"}


def test_listing_imports_nothing(apart: Site) -> None:
    for name in ("good", "broken"):
        apart.backend(name, source=f"raise AssertionError('{name} was imported')")
    before = imported(apart, "import statelink")
    after = imported(apart, "import statelink; assert len(statelink.list_backends()) >= 3")
    assert not [name for name in after - before if name.startswith("statelink")]
    assert not after & HEAVY


def test_loading_one_imports_only_that_one(apart: Site) -> None:
    apart.backend("good")
    apart.backend("broken", source="raise AssertionError('it was imported')")
    modules = imported(apart, "from statelink.registry import load_backend; load_backend('good')")
    assert "statelink_good" in modules
    assert not modules & {"statelink_broken", "statelink.tcp", *HEAVY}


def test_opening_a_link_imports_only_its_backend(apart: Site) -> None:
    apart.backend("broken", source="raise AssertionError('it was imported')")
    modules = imported(
        apart,
        """
import numpy as np
import statelink
from statelink import state
rows = np.zeros((2, 8), np.uint8)
link = statelink.open({"role": "decode", "backend": "tcp"}, state.describe("d", [state.aux_rows({"row": rows})]))
link.close()
""",
    )
    assert "statelink.tcp" in modules
    assert not modules & {"statelink_broken", *HEAVY}


def test_the_core_works_where_nothing_else_is_installed(apart: Site, bare_path: str) -> None:
    printed = apart.python(
        """
        import importlib.util, statelink
        assert importlib.util.find_spec("pytest") is None and importlib.util.find_spec("torch") is None
        print([each.name for each in statelink.list_backends()])
        """,
        path=bare_path,
        flags=("-S",),
    )
    assert printed == "['tcp']\n"
