"""``statelink backends`` and ``statelink doctor`` beside packages whose import or probe ends the process."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.registry.sites import BACKEND, Site

from statelink.cli import main

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "import sys; sys.argv[0] = 'statelink'; from statelink.cli import main; main()"
BUS = "import os, signal; print('a', 'library', 'speaks'); os.kill(os.getpid(), signal.SIGBUS)"
EXIT = "import os; os.write(2, b'fatal error: no memory'); os._exit(3)"
LOADED = (
    "import ctypes, os, signal, msgspec._core\nctypes.CDLL(msgspec._core.__file__)\nos.kill(os.getpid(), signal.SIGBUS)"
)
PROBE = '        return Probe(ok=True, reason="here [always]", details={"depth": str(options.depth)})'


@pytest.fixture(name="damaged")
def damaged_fixture(site: Site) -> Site:
    site.backend("good")
    site.backend("broken", source=BUS)
    site.backend("exits", source=EXIT)
    late = BACKEND.format(cls="Made", api=1, name="other")
    site.backend("other", source=late.replace(PROBE, "        import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    return site


NAMES = ("good", "broken", "exits", "other")


def run(site: Site, *arguments: str, expect: int = 0, plugins: Sequence[str] = NAMES, **environment: str) -> str:
    """Run a command in a process of its own."""
    allowed = ",".join(f"statelink-{name}" for name in plugins)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return site.run(command, expect=expect, environment={"STATELINK_PLUGINS": allowed, **environment})


def test_backends_goes_on_and_says_how_each_ended(damaged: Site) -> None:
    rows = {row["name"]: row for row in json.loads(run(damaged, "backends", "--json"))}
    assert {name: row["state"] for name, row in rows.items()} == {
        "broken": "broken",
        "exits": "broken",
        "good": "ready",
        "other": "broken",
        "tcp": "ready",
    }
    reasons = {name: rows[name]["reason"] for name in ("broken", "exits", "other")}
    assert reasons["broken"].startswith("importing or probing it ended the process: SIGBUS")
    assert reasons["broken"].endswith("; printed: a library speaks")
    assert reasons["exits"].startswith("importing or probing it ended the process: exit status 3")
    assert reasons["exits"].endswith("; printed: fatal error: no memory")
    assert reasons["other"].startswith("importing or probing it ended the process: SIGSEGV")
    assert all("install the library again" in rows[name]["hint"] for name in reasons)
    assert "broken: importing or probing it ended the process: SIGBUS" in run(damaged, "backends")


def test_doctor_goes_on_and_has_a_problem_for_each(damaged: Site) -> None:
    said = json.loads(run(damaged, "doctor", "--no-loopback", "--json", expect=1))
    assert said["ok"] is False
    by_name: dict[str, list[dict[str, Any]]] = {}
    for check in said["checks"]:
        by_name.setdefault(check["about"], []).append(check)
    assert [each["verdict"] for each in by_name["good"]] == ["ok"] * len(by_name["good"])
    assert [each["what"] for each in by_name["good"]] == ["backend", "probe", "stopped peers"]
    assert [each["verdict"] for each in by_name["tcp"]] == ["ok"] * 3
    (broken,) = by_name["broken"]
    assert (broken["what"], broken["verdict"]) == ("backend", "problem")
    assert broken["found"].startswith("importing or probing it ended the process: SIGBUS")
    assert "install the library again" in broken["hint"]
    assert [(each["what"], each["verdict"]) for each in by_name["other"]] == [("backend", "ok"), ("probe", "problem")]
    text = run(damaged, "doctor", "--no-loopback", expect=1)
    assert "3 problems" in text


def test_the_file_and_the_package_that_brought_it_are_named(site: Site) -> None:
    site.backend("broken", source=LOADED)
    (row,) = (each for each in json.loads(run(site, "backends", "--json")) if each["name"] == "broken")
    assert "; the last library that it loaded: /" in row["reason"]
    assert "pip install --force-reinstall --no-deps msgspec)" in row["hint"]


def test_the_configuration_may_name_such_a_backend_or_leave_the_choice(damaged: Site) -> None:
    for configured in ("auto", "broken"):
        printed = run(damaged, "doctor", "--no-loopback", "--json", expect=1, STATELINK_BACKEND=configured)
        checks = json.loads(printed)["checks"]
        (check,) = (each for each in checks if each["what"] == "configuration")
        assert check["found"].startswith("checking it ended the process: ")
        assert {each["verdict"] for each in checks if each["about"] == "good"} <= {"ok", "problem"}
        assert next(each["what"] for each in checks if each["about"] == "tcp") == "backend"


def test_a_package_with_hooks_may_be_the_one(site: Site) -> None:
    site.package("statelink-hook", statelink_plugins={"hook": "statelink_hook"})
    site.module("statelink_hook", BUS)
    checks = json.loads(run(site, "doctor", "tcp", "--no-loopback", "--json", expect=1, plugins=["hook"]))["checks"]
    (check,) = (each for each in checks if each["what"] == "hook packages")
    assert (check["verdict"], check["found"].partition(";")[0]) == ("problem", "loading them ended the process: SIGBUS")
    assert {each["verdict"] for each in checks if each["about"] == "tcp"} == {"ok"}


def test_one_that_hangs_is_ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.backend("broken", source="import time; time.sleep(1000)")
    real, start = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: start + 20 * (real() - start))  # two minutes pass in six seconds
    result = CliRunner().invoke(main, ["backends", "--json"])
    (row,) = (each for each in json.loads(result.stdout) if each["name"] == "broken")
    assert (row["state"], row["reason"]) == ("broken", "importing or probing it came to no end within 120 seconds")


def test_what_a_library_prints_is_not_in_the_result(site: Site) -> None:
    noisy = "import os; os.write(1, b'noise'); print('noise'); os.write(2, b'noise')\n"
    site.backend("good", source=noisy + BACKEND.format(cls="Made", api=1, name="good"))
    assert "noise" not in run(site, "backends", "--json")
    assert "noise" not in run(site, "doctor", "good", "--no-loopback")
