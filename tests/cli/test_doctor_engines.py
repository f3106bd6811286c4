"""``statelink doctor`` says whether the adapters here know the engines that are installed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from statelink.cli import main

if TYPE_CHECKING:
    from tests.registry.sites import Site

ADAPTER = """
from statelink.seam import Kind, Seam, Table

SEAM = Seam(
    adapter="statelink-engine",
    engine="engine",
    title="Engine",
    tables=(Table(Kind.PARAMETERS, {"engine:load": "blocks"}),),
    releases={"1.2": {}, "1.1": {}},
)
"""
KNOWS = "def load(blocks): ..."


def check(name: str = "engine") -> dict[str, Any]:
    found = json.loads(CliRunner().invoke(main, ["doctor", "tcp", "--no-loopback", "--json"]).stdout)["checks"]
    (it,) = (each for each in found if each["what"] == name)
    assert it["about"] == "machine"
    return dict(it)


CONFIGURED = """
import json, os
import statelink
from statelink.errors import ConfigError
from statelink.seam import Variable

def read():
    try:
        given = json.loads(os.environ["STATELINK_ENGINE_CONFIG"])
    except ValueError as error:
        raise ConfigError("no JSON", hint="write JSON", code="config.file") from error
    return statelink.LinkConfig.read({**given, "role": "prefill"})

SEAM.variable = Variable("STATELINK_ENGINE_CONFIG", read)
"""


def adapter(site: Site, version: str = "", engine: str = KNOWS) -> None:
    site.package("statelink-engine", statelink_engines={"engine": "statelink_engine:SEAM"})
    site.module("statelink_engine", ADAPTER)
    if version:
        site.package("engine", version)
        site.module("engine", engine)


@pytest.mark.parametrize("version", ["1.2.0", "1.1.5"])
def test_an_engine_that_the_adapter_knows(site: Site, version: str) -> None:
    adapter(site, version)
    found = check()
    assert (found["verdict"], found["found"]) == ("ok", f"Engine {version}, which statelink-engine knows")


def test_an_engine_that_is_not_there(site: Site) -> None:
    adapter(site)
    found = check()
    assert found["verdict"] == "not applicable"
    assert found["found"] == "Engine is not installed; statelink-engine works with Engine 1.1 or 1.2"


def test_another_release_is_a_problem_and_the_hint_says_how_to_try_it(site: Site) -> None:
    adapter(site, "1.3.0")
    found = check()
    assert (found["verdict"], found["code"]) == ("problem", "config.engine")
    assert found["found"] == "Engine 1.3.0: Engine 1.1 or 1.2 is expected; 1.3.0 is installed"
    assert "'version' in 'allow'" in found["hint"]


def test_a_known_release_that_was_changed_is_a_problem(site: Site) -> None:
    adapter(site, "1.2.9", "def load(blocks, stream): ...")
    found = check()
    assert found["verdict"] == "problem"
    assert found["found"] == "Engine 1.2.9: engine.load is defined with 'blocks stream', and is known with 'blocks'"
    assert "allow" not in found["hint"]


def test_an_adapter_that_cannot_be_imported_is_a_problem(site: Site) -> None:
    adapter(site)
    site.module("statelink_engine", "raise OSError('no such library')")
    found = check()
    assert found["verdict"] == "problem"
    assert found["found"] == "statelink-engine cannot say what it uses of its engine: OSError: no such library"


def test_an_engine_that_ends_its_process_is_a_problem(site: Site) -> None:
    adapter(site, "1.2.0", "import os; os.abort()")
    found = check("engines")
    assert (found["verdict"], found["found"].partition(";")[0]) == (
        "problem",
        "importing an engine ended the process: SIGABRT",
    )


@pytest.mark.parametrize(
    ("given", "verdict", "said"),
    [
        ('{"backend": "tcp"}', "ok", "backend tcp; Engine sets the role"),
        ("{", "problem", "no JSON"),
        ('{"backend": "tpc"}', "problem", "no backend named 'tpc'"),
        ('{"backend": "tcp", "listen": "here"}', "problem", "here"),
        ('{"backend": "tcp", "options": {"prt": 1}}', "problem", "prt"),
    ],
)
def test_what_configures_the_adapter_is_read_as_the_adapter_does(
    site: Site, monkeypatch: pytest.MonkeyPatch, given: str, verdict: str, said: str
) -> None:
    adapter(site)
    site.module("statelink_engine", ADAPTER + CONFIGURED)
    monkeypatch.setenv("STATELINK_ENGINE_CONFIG", given)
    found = check("STATELINK_ENGINE_CONFIG")
    assert found["verdict"] == verdict
    assert said in found["found"]
    assert bool(found["hint"]) == (verdict == "problem")
    assert "STATELINK_CONFIG" in check("configuration")["found"]
    assert check()["verdict"] == "not applicable", "the engine need not be there"
