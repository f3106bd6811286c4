"""The check of a release: what it builds of the core, and what it finds in archives that are wrong."""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
from tools.release_check import (
    OLDEST_PYTHON,
    PLACES,
    ROOT,
    build,
    contents,
    defects,
    oldest,
    trials,
    version_of,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_every_distribution_is_checked_and_has_the_licence() -> None:
    found = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")]
    folders = {str(path.parent.relative_to(ROOT)) for path in found if "\n[project]\n" in path.read_text()}
    folders -= {each for each in folders if each.startswith("build") or "backend-" in each}
    assert set(PLACES) == folders
    licence = (ROOT / "LICENSE").read_bytes()
    for place in PLACES:
        assert (ROOT / place / "LICENSE").read_bytes() == licence, place


@pytest.mark.parametrize("place", ["core", "plugins/mori"])
def test_archives_have_types_and_the_licence_and_no_tests(place: str, tmp_path: Path) -> None:
    """``plugins/mori`` has a stand-in and tests in its folder."""
    made = build(ROOT / place, tmp_path / "dist")
    for archive in (made.sdist, made.wheel):
        assert list(defects(archive)) == []
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in contents(made.wheel))
    source = {name.partition("/src/")[2] for name in contents(made.sdist) if "/src/" in name}
    shipped = {name for name in contents(made.wheel) if ".dist-info/" not in name}
    assert shipped == source, "the wheel has what the sdist has"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a/__init__.py", "a/py.typed"], ["it has no LICENSE"]),
        (["a/__init__.py", "a-1.dist-info/licenses/LICENSE"], ["it has no py.typed"]),
        (["a/py.typed", "LICENSE", "tests/conftest.py"], ["it ships tests/conftest.py"]),
        (["a/py.typed", "LICENSE", "a/test_b.py"], ["it ships a/test_b.py"]),
        (["a/py.typed", "LICENSE", "a/testing/clauses.py"], []),
    ],
)
def test_wrong_archives(tmp_path: Path, names: list[str], found: list[str]) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    assert list(defects(wheel)) == found
    sdist = tmp_path / "a-1.tar.gz"
    with tarfile.open(sdist, "w:gz") as packed:
        for name in names:
            packed.addfile(tarfile.TarInfo(f"a-1/{name}"), io.BytesIO())
    assert [each.replace("a-1/", "") for each in defects(sdist)] == [*found, "it has no pyproject.toml"]


def test_the_oldest_dependencies_are_those_that_a_wheel_allows(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    requires = ["b>=1.2,<3", 'c>=26; python_version < "3.11"', 'd>=4; extra == "x"']
    requires += ['e>=5; python_version < "3.11" and extra == "x"', "f"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", "".join(f"Requires-Dist: {each}\n" for each in requires))
    young = 'python_version < "3.11"'
    assert list(oldest(wheel)) == ["b==1.2", f"c==26; {young}", "d==4", f"e==5; {young}"]


def test_the_oldest_dependencies_are_tried_with_the_oldest_python(capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"old": (3, 10), "new": (3, 13)}
    assert list(trials(versions, ["oldest", "newest"])) == [("old", "oldest"), ("old", "newest"), ("new", "newest")]
    (said,) = capsys.readouterr().out.splitlines()
    assert json.loads(said)["left_out"] == "oldest"
    assert json.loads(said)["python"] == "new"
    assert list(trials({"new": (3, 13)}, ["oldest"])) == []


def test_the_oldest_python_is_the_one_that_the_core_requires() -> None:
    required = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "core" / "pyproject.toml").read_text())
    assert required
    assert (int(required[1]), int(required[2])) == OLDEST_PYTHON
    assert version_of(sys.executable) == sys.version_info[:2]
