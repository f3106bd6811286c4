"""The README's table of what moves over what: it is what the kit's reports say, and staleness is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from tools import matrix

from statelink import state
from statelink.testing._pools import LABELS
from statelink.testing._report import Cell, Report, Run

ROOT = Path(__file__).parents[2]
How = Literal["real", "simulator", "not run"]


def report(backend: str, cells: dict[tuple[str, str], How]) -> Report:
    states = [Cell(type=type, topology=topology, how=how) for (type, topology), how in cells.items()]
    run = Run(suite="TestIt", backend=backend, options={}, clauses=[], states=states)
    return Report(statelink="0", runs=[run])


def test_a_cell_says_what_holds_for_which_topology() -> None:
    tcp = report("tcp", {("kv, NHD", "1 to 1"): "real", ("kv, NHD", "2 to 1"): "real"})
    nixl = report("nixl", {("kv, NHD", "1 to 1"): "real", ("kv, NHD", "2 to 1"): "not run"})
    again = report("nixl", {("kv, NHD", "2 to 1"): "simulator"})
    row = matrix.render([tcp, nixl, again]).splitlines()[2]
    assert row == "| `kv`, NHD | real | real: 1 to 1; simulator: 2 to 1 | not run | not run | not run |"


def test_a_stale_table_fails(tmp_path: Path) -> None:
    readme, found = tmp_path / "README.md", tmp_path / "report.json"
    readme.write_text(f"before\n{matrix.BEGIN}{matrix.END}after\n")
    found.write_bytes(msgspec.json.encode(report("tcp", {("swa", "1 to 1"): "real"})))
    command = [sys.executable, "-m", "tools.matrix", str(found), "--readme", str(readme)]

    def run(*more: str) -> int:
        return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, check=False).returncode

    assert run() == 1
    assert run("--write") == 0
    assert run() == 0
    assert readme.read_text().startswith("before\n")
    assert readme.read_text().endswith("after\n")
    readme.write_text(readme.read_text().replace("| real |", "| not run |"))
    assert run() == 1


def test_no_built_in_type_is_left_out() -> None:
    assert set(LABELS.values()) == {kind.name for kind in state.state_types() if "." not in kind.name}


@pytest.mark.parametrize("label", LABELS)
def test_the_readme_has_a_row_for_every_type(label: str) -> None:
    """That its cells are right is compared with a whole run, by ``make matrix``."""
    table = matrix.parts(matrix.README.read_text())[1].splitlines()
    kind, _, layout = label.partition(", ")
    (row,) = [line for line in table if line.startswith(f"| `{kind}`{', ' + layout if layout else ''} |")]
    assert row.split("|")[5:7] == [" not run "] * 2
