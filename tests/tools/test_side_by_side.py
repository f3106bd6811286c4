"""`tools/side_by_side.py`: every share is run, and what failed is run again by itself, if it is little."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tools import side_by_side

if TYPE_CHECKING:
    from pathlib import Path

ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", ["a - b", "c"])
def test_once(name):
    before = Path(__file__).with_suffix(".ran")
    if name != "c" and not before.exists():
        before.touch()
        raise AssertionError("for want of time")
"""
NEVER = """
import pytest

@pytest.mark.parametrize("each", range({failing}))
def test_never(each):
    raise AssertionError("always")
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two shares."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -pstatelink.testing.plugin --import-mode=importlib\n")
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text("def test_well(): pass\n")
    monkeypatch.setattr(side_by_side, "ROOT", tmp_path)
    monkeypatch.setattr(side_by_side, "SHARES", {"near": ("near",)})
    return tmp_path


def run(root: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = side_by_side.main(root / "found")
    return status, capfd.readouterr().out


def test_failed_once(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / "near" / "test_once.py").write_text(ONCE)
    status, said = run(root, capfd)
    assert status == 0
    assert "1 failed, 2 passed" in said
    assert "failed beside the others, passed by itself: near/test_once.py::test_once[a - b]" in said
    assert sorted(each.name for each in (root / "found").glob("*.json")) == [
        "near-again.json",
        "near.json",
        "others.json",
    ]


def test_fails_always(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One test of a share, by itself too; and too many of the other share to be looked at again."""
    (root / "near" / "test_once.py").write_text(ONCE)
    (root / "near" / "test_never.py").write_text(NEVER.format(failing=1))
    (root / "far" / "test_never.py").write_text(NEVER.format(failing=side_by_side.FEW + 1))
    (root / "far" / "test_once.py").write_text(ONCE)
    status, said = run(root, capfd)
    assert status == pytest.ExitCode.TESTS_FAILED
    named = said.partition("passed by itself")[2]
    assert "near/test_once.py::test_once[a - b]" in named
    assert "test_never" not in named
    assert "== tests: near-again" in said
    assert "== tests: others-again" not in said
