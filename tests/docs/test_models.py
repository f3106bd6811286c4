"""The page about models knows every state type, and says of the presets what `statelink explain` makes of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import state_table

from statelink import state
from statelink.state import Coverage, IndexSpace
from statelink_explain import Layout, Side, inventories, preset, presets

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()
USES = PAGE.partition("## Unequal ranks")[0]


def words(cell: str) -> set[str]:
    return set(re.findall(r"`([\w.-]+)`", cell))


ROWS = [line.strip("| ").split(" | ") for line in USES.splitlines() if re.match(r"\| [^|]+ \| [^|]*`", line)] + [
    line.strip("| ").split(" | ") for line in USES.splitlines() if line.count("|") == 6 and "`" in line
]


def test_every_type_has_a_use() -> None:
    assert {each.name for each in state.state_types() if "." not in each.name} <= words(USES)


def test_the_functions_are_there() -> None:
    named = {
        name for name in words(USES) if "_" in name and name.rpartition("_")[2] in ("pages", "slots", "rows", "items")
    }
    assert {"kv_pages", "mamba_slots", "ring_rows", "aux_rows", "whole_items"} <= named
    assert [name for name in named if name not in state.__all__] == []


@pytest.mark.parametrize("name", presets())
def test_a_preset_has_the_types_of_its_row(name: str) -> None:
    (row,) = (row for row in ROWS if len(row) == 5 and name in words(row[4]))
    (rank,) = inventories(Side(instance="one", model=preset(name), layout=Layout()))
    assert words(row[3]) == {component.type for component in rank.components}


def test_the_table_of_types_is_up_to_date() -> None:
    lines = state_table.render().splitlines(keepends=True)
    rendered = "".join(line for line in lines if not re.match(r"\| `\w+\.", line))  # without those of test packages
    assert state_table.parts(PAGE)[1] == rendered, "run 'python -m tools.state_table'"


def test_other_pages_count_the_types() -> None:
    types = sum("." not in each.name for each in state.state_types())
    for page in (ROOT / "README.md", ROOT / "docs" / "comparison.md"):
        assert re.findall(r"\[(\d+) (?:state )?types\]", page.read_text()) == [str(types)]


@pytest.mark.parametrize("value", [*IndexSpace, *Coverage], ids=str)
def test_every_word_of_the_table_is_explained(value: IndexSpace | Coverage) -> None:
    assert re.search(rf"^\| \*{value.value}\* \|", PAGE, re.MULTILINE)


def test_unequal_ranks_hand_a_request_over() -> None:
    example = ROOT / "examples" / "unequal_ranks.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=100, check=False)
    # On a machine that is busy, links may warn that somebody does not answer yet.
    assert (done.returncode, done.stdout) == (0, "every byte is right on every rank\n"), done.stderr
