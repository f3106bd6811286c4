"""``statelink new-backend``: what it makes is a package that works, and what it must not do it does not do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.registry.sites import SOURCE, Site

from statelink.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

EXAMPLE = Path(__file__).parents[2] / "examples" / "backend-shm"

MADE = {
    "README.md",
    "pyproject.toml",
    "src/statelink_my_own/__init__.py",
    "src/statelink_my_own/_backend.py",
    "src/statelink_my_own/py.typed",
    "tests/test_conformance.py",
}


def run(*arguments: str | Path, expect: int = 0) -> str:
    result = CliRunner().invoke(main, ["new-backend", *map(str, arguments)])
    assert result.exit_code == expect, result.output
    return result.output


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_package_is_complete_and_its_backend_is_ready(tmp_path: Path, site: Site) -> None:
    """Installed by its own metadata, here without pip; `make third-party` uses pip, checks types, and runs the kit."""
    folder = tmp_path / "made"
    printed = run("my-own", "--directory", folder)
    assert f"pip install -e '{folder}[test]'" in printed
    assert set(tree(folder)) == MADE
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["statelink.backends"]
    assert points == {"my-own": "statelink_my_own:MyOwnBackend"}
    assert project["project"]["dependencies"] == ["statelink>=0.1,<0.2"]
    site.package(project["project"]["name"], statelink_backends=points)
    environment = {"STATELINK_PLUGINS": "statelink-my-own"}
    path = os.pathsep.join([str(folder / "src"), str(SOURCE)])
    listing = "import sys; sys.argv = ['statelink', 'backends', '--json']; from statelink.cli import main; main()"
    found = {row["name"]: row for row in json.loads(site.python(listing, path=path, environment=environment))}
    assert found["my-own"]["state"] == "ready", found["my-own"]


def test_without_a_directory_it_is_named_as_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("mine").startswith("statelink-mine: ")
    assert (tmp_path / "statelink-mine" / "src" / "statelink_mine" / "_backend.py").exists()


@pytest.mark.parametrize("name", ["", "Mine", "3d", "a--b", "-a", "a-", "a_b", "a.b", "../up", "a b", "ü", "a" * 41])
def test_a_name_that_no_package_can_have_is_refused(tmp_path: Path, name: str) -> None:
    printed = run("--directory", tmp_path / "made", "--", name, expect=1)
    assert f"{name!r} is not a name for a backend" in printed
    assert "hint: at most 40 characters: lower-case letters" in printed
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tcp", "a backend named 'tcp' is installed already: statelink 0.1.0, statelink.tcp:TcpBackend"),
        ("good", "a backend named 'good' is installed already: statelink-good 0.1, statelink_good:Made"),
        ("nixl", "'nixl' is the name of the backend of statelink-nixl"),
        ("statelink-mine", "hint: name the backend 'mine'; its package is 'statelink-mine' then"),
        ("typo", "the package 'statelink-typo' is installed already, and is no backend"),
    ],
)
def test_a_name_that_is_taken_is_refused(tmp_path: Path, site: Site, name: str, text: str) -> None:
    site.backend("good")
    site.package("statelink-typo")
    assert text in run(name, "--directory", tmp_path / "made", expect=1)
    assert not (tmp_path / "made").exists()


def test_nothing_that_exists_is_overwritten(tmp_path: Path) -> None:
    run("mine", "--directory", tmp_path / "full")
    before = tree(tmp_path / "full")
    assert "exists already, and is not overwritten" in run("other", "--directory", tmp_path / "full", expect=1)
    assert tree(tmp_path / "full") == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert "exists already" in run("mine", "--directory", tmp_path / "link", expect=1)
    assert not tree(tmp_path / "empty")
    run("mine", "--directory", tmp_path / "empty")
    assert tree(tmp_path / "empty") == before
    (tmp_path / "file").touch()
    run("mine", "--directory", tmp_path / "file", expect=2)


def test_a_folder_that_cannot_be_made_is_said_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    printed = run("mine", "--directory", tmp_path / "file" / "below", expect=1)
    assert "cannot be written: Not a directory" in printed


def test_the_example_is_what_the_command_makes_with_another_transport(tmp_path: Path) -> None:
    run("shm", "--directory", tmp_path / "made")
    made = tree(tmp_path / "made")
    backend = made.pop("src/statelink_shm/_backend.py").decode()
    readme = made.pop("README.md").decode()
    test = made.pop("tests/test_conformance.py").decode()
    for place, content in made.items():
        assert (EXAMPLE / place).read_bytes() == content, place
    assert "    processes = 1  # take this line away once it reaches other processes\n" in test
    assert (EXAMPLE / "tests" / "test_conformance.py").read_text() == "".join(
        line for line in test.splitlines(keepends=True) if "processes = 1" not in line
    )
    # Both leave the check of blocks to the core's helper.
    for text in (backend, (EXAMPLE / "src" / "statelink_shm" / "_backend.py").read_text()):
        assert "Ends.of(batch, self._regions, " in text
    assert readme.startswith("# statelink-shm\n")
