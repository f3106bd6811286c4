"""The kit for strategies: right ones keep it, and one that is wrong in one way breaks the clause that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.testing.test_kit import HERE, ROOT, broken, kit

from statelink_conformance import StrategyTests

if TYPE_CHECKING:
    from statelink_conformance.report import Clause

THIRD_PARTY = ROOT / "tests" / "third_party"
BROKEN: dict[str, tuple[str, str]] = broken("wrong_strategies.py")
KEPT = "test_it_carries_its_state_type"


class TestStaged(StrategyTests):
    """The core's own that does not write in place."""

    strategy = "staged"
    config: ClassVar[Any] = {"staging": {"mode": "always", "ring_bytes": 1 << 20, "parcel_bytes": 1 << 18}}


@pytest.fixture(scope="module")
def clauses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Clause]]:
    """What the kit says of every wrong strategy, and of the third party's."""
    nodes = [
        f"{HERE / 'wrong_strategies.py'}::Test{name}::{each}"
        for name, (first, _) in BROKEN.items()
        for each in (first, KEPT)
    ]
    packages = [HERE / "strategies", THIRD_PARTY / "packages"]
    report = tmp_path_factory.mktemp("strategies") / "report.json"
    return kit(report, *nodes, str(THIRD_PARTY / "pieces.py"), packages=packages)


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_strategy_fails_for_the_right_reason(clauses: dict[str, list[Clause]], name: str) -> None:
    wrong, reason = BROKEN[name]
    (failed,) = [clause for clause in clauses[name] if clause.verdict == "failed"]
    assert failed.name == wrong
    assert reason in failed.reason
    assert failed.todo
    assert [clause.verdict for clause in clauses[name] if clause.name == KEPT] == ["passed"]


def test_a_third_partys_strategy_passes(clauses: dict[str, list[Clause]]) -> None:
    """It writes in place, in smaller blocks than are planned."""
    assert {clause.verdict for clause in clauses["Pieces"]} == {"passed"}
    assert "test_its_blocks_are_those_of_the_plan[2 to 1]" in {clause.name for clause in clauses["Pieces"]}
