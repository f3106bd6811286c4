"""``statelink backends``: everything that is installed, in what state, whatever state it is in."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.registry.sites import BACKEND, Site

from statelink.cli import main

PROBE = '        return Probe(ok=True, reason="here [always]", details={"depth": str(options.depth)})'


@pytest.fixture(name="full")
def full_fixture(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """One package of each kind."""
    site.backend("good")
    site.backend("broken", source="raise OSError('cannot open [/dev/infiniband/uverbs0]; pip install x[extra]')")
    site.backend("exits", source="import sys; sys.exit(3)")
    site.backend("old", api=0)
    site.backend("odd", source="Made = 5")
    site.backend("same")
    site.package(
        "statelink-twin", statelink_backends={"same": "statelink_twin:Made", "odd[bold]": "statelink_odd:Made"}
    )
    unwell = BACKEND.format(cls="Made", api=1, name="other")
    site.backend("other", source=unwell.replace(PROBE, "        raise RuntimeError('[bold]the probe[/bold] broke')"))
    away = BACKEND.format(cls="Made", api=1, name="mem")
    answer = "        return Probe(ok=False, reason='no [device]', hint='buy one')"
    site.backend("mem", source=away.replace(PROBE, answer))
    site.package("statelink-typo")
    (site.folder / "statelink_typo-0.1.dist-info" / "entry_points.txt").write_text("[statelink.backends]\nfoo\n")
    monkeypatch.setenv("COLUMNS", "200")
    return site


def run(*arguments: str, expect: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == expect, result.output
    return result.output


def rows(*arguments: str) -> dict[str, dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("backends", "--json", *arguments))
    return {f"{row['name']}@{row['distribution']}": row for row in found}


EXPECTED = {
    "broken@statelink-broken": (
        "broken",
        "backend 'broken' (statelink-broken 0.1, statelink_broken:Made) failed to load: "
        "OSError: cannot open [/dev/infiniband/uverbs0]; pip install x[extra]",
        "",
    ),
    "exits@statelink-exits": (
        "broken",
        "backend 'exits' (statelink-exits 0.1, statelink_exits:Made) failed to load: SystemExit: 3",
        "",
    ),
    "good@statelink-good": ("ready", "here [always]", ""),
    "mem@statelink-mem": ("unavailable", "no [device]", "buy one"),
    "odd@statelink-odd": (
        "broken",
        "backend 'odd' (statelink-odd 0.1, statelink_odd:Made) is not a backend: it is 5, not a subclass of Backend",
        "",
    ),
    "odd[bold]@statelink-twin": (
        "broken",
        "backend 'odd[bold]' (statelink-twin 0.1, statelink_odd:Made) is not a backend: "
        "it is 5, not a subclass of Backend",
        "",
    ),
    "old@statelink-old": (
        "broken",
        "backend 'old' (statelink-old 0.1, statelink_old:Made) was built for plugin API 0, this core speaks 1",
        "pip install -U statelink-old",
    ),
    "other@statelink-other": (
        "broken",
        "backend 'other' cannot say whether it runs here: its probe raised RuntimeError: [bold]the probe[/bold] broke",
        "tell the author of the package; `statelink conform other -k Declaration` tests it",
    ),
    "same@statelink-same": ("conflict", "several packages bring this name", "uninstall all but one of them"),
    "same@statelink-twin": ("conflict", "several packages bring this name", "uninstall all but one of them"),
}


def test_the_name_of_one_that_is_built_in_is_not_free(site: Site) -> None:
    site.package("statelink-twin", statelink_backends={"tcp": "statelink_twin:Made"})
    hint = "'tcp' is built in: rename yours in statelink-twin, or uninstall it"
    assert {row["hint"] for row in rows().values() if row["state"] == "conflict"} == {hint}


def test_json_has_every_backend_with_its_state_and_reason(full: Site) -> None:
    found = rows()
    tcp = found.pop("tcp@statelink")
    assert {key: (row["state"], row["reason"], row["hint"]) for key, row in found.items()} == EXPECTED
    assert list(found) == sorted(found)
    assert (tcp["state"], tcp["entry_point"]) == ("ready", "statelink.tcp:TcpBackend")
    assert tcp["capabilities"]["memory_kinds"] == ["dram"]
    assert found["good@statelink-good"] == {
        "name": "good",
        "distribution": "statelink-good",
        "version": "0.1",
        "entry_point": "statelink_good:Made",
        "state": "ready",
        "reason": "here [always]",
        "hint": "",
        "capabilities": {
            "memory_kinds": ["dram"],
            "state_types": ["any"],
            "submit_mode": "blocking",
            "source": "mover",
            "target": "none",
            "thread_safe": False,
            "stalled_peers": 0,
            "max_blocks": 16384,
            "max_bytes": 64 << 20,
            "links_per_process": None,
            "both_roles": True,
        },
        "details": {"depth": "1"},
    }


def test_the_table_says_the_same_and_takes_no_text_for_markup(full: Site) -> None:
    printed = run("backends")
    for key, (state, reason, hint) in EXPECTED.items():
        name, _, distribution = key.partition("@")
        assert any(line.split()[:4] == [name, distribution, "0.1", state] for line in printed.splitlines()), (
            f"{key} is not in the table:\n{printed}"
        )
        flat = " ".join(printed.split())
        assert f"{name}: {reason}" in flat
        assert hint in flat


def test_nothing_is_imported_where_probing_is_off(full: Site) -> None:
    found = rows("--no-probe")
    assert {row["state"] for key, row in found.items() if not key.startswith("same@")} == {"listed"}
    assert found["same@statelink-same"]["state"] == "conflict"
    assert not {name for name in sys.modules if name.startswith("statelink_")} & {"statelink_good", "statelink_broken"}


def test_the_installed_command_lists_them_too(full: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Path(sys.executable).parent / "statelink"
    allowed = ",".join(f"statelink-{name}" for name in ("good", "broken", "exits"))
    printed = full.run([str(command), "backends"], environment={"STATELINK_PLUGINS": allowed})
    lines = [line.split() for line in printed[printed.index("name") :].splitlines()]
    assert [line[0] for line in lines[1:5]] == ["broken", "exits", "good", "tcp"]
    assert "SystemExit: 3" in printed
    assert re.search(r"\d+ hidden by STATELINK_PLUGINS: .*\bmem\b", printed)
    assert "hidden" not in full.run([str(command), "backends"])


def test_where_nothing_but_the_core_is_installed_there_is_tcp(site: Site, bare_path: str) -> None:
    code = "import sys; sys.argv = ['statelink', 'backends', '--json']; from statelink.cli import main; main()"
    found = json.loads(site.python(code, path=bare_path, flags=("-S",)))
    assert [(row["name"], row["state"]) for row in found] == [("tcp", "ready")]


@pytest.mark.parametrize("arguments", [("backends",), ("backends", "--json"), ("doctor", "odd", "--json")])
@pytest.mark.parametrize(
    "source",
    [
        "raise OSError('no file \\udcff')",
        BACKEND.format(cls="Made", api=1, name="odd").replace("here [always]", "no file \\udcff"),
    ],
    ids=["error", "reason"],
)
def test_half_a_surrogate_pair_in_a_text_of_a_plugin_is_shown(
    site: Site, source: str, arguments: tuple[str, ...]
) -> None:
    """Python makes them of file names that are no UTF-8."""
    site.backend("odd", source=source)
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "no file \\udcff" in result.output.replace("\\\\", "\\")
