"""The kit for packages: one that is wrong breaks the clauses that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.testing.test_kit import HERE, broken, kit

if TYPE_CHECKING:
    from statelink_conformance.report import Clause


@pytest.fixture(scope="module")
def clauses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Clause]]:
    return kit(tmp_path_factory.mktemp("packages") / "report.json", str(HERE / "untidy.py"))


BROKEN: dict[str, dict[str, str]] = broken("untidy.py")


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_package_fails_for_the_right_reasons(clauses: dict[str, list[Clause]], name: str) -> None:
    failed = {each.name.partition("[")[0]: each for each in clauses[name] if each.verdict == "failed"}
    assert failed.keys() == BROKEN[name].keys()
    for clause, reason in BROKEN[name].items():
        assert reason in failed[clause].reason
    assert all(each.todo for each in failed.values())


def test_a_package_without_an_entry_point_is_told_so(clauses: dict[str, list[Clause]]) -> None:
    said = {each.name: each for each in clauses["Unnamed"]}
    for name in ("test_it_names_its_library", "test_its_metadata_is_complete", "test_importing_it_imports_no_library"):
        reason = "no installed package has an entry point 'unnamed' in the group 'statelink.backends'"
        assert said[name].reason == reason
        assert said[name].todo.startswith('Write `NAME = "module:Class"` below')
