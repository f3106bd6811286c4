"""The command that a hint gives installs what it names, wherever this core came from."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from statelink.hints import install_hint

ROOT = Path(__file__).parents[2]


class Installed:
    """A core that pip has installed from somewhere, and a checkout that it may have come from."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "a checkout"
        info = folder / "site" / "statelink-9.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: statelink\nVersion: 9\n")
        self.site, self._url = info.parent, info / "direct_url.json"
        for path, name in (("core", "statelink"), ("plugins/fast", "statelink-fast"), ("plugins/odd", "")):
            (self.checkout / path).mkdir(parents=True)
            text = f'[project]\nname = "{name}"\n' if name else 'project = "none"\n'
            (self.checkout / path / "pyproject.toml").write_text(text)

    def came(self, **url: Any) -> None:
        self._url.write_text(json.dumps({"url": (self.checkout / "core").as_uri(), **url}))

    def broken(self, text: str) -> None:
        self._url.write_text(text)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    made = Installed(tmp_path)
    monkeypatch.syspath_prepend(str(made.site))
    return made


def test_from_an_editable_checkout(installed: Installed) -> None:
    installed.came(dir_info={"editable": True})
    assert shlex.split(install_hint("statelink[plot]")) == [
        *("pip", "install", "-e"),
        f"{installed.checkout}/core[plot]",
    ]
    expected = ["pip", "install", "-e", f"{installed.checkout}/plugins/fast"]
    assert shlex.split(install_hint("statelink-fast")) == expected
    assert shlex.split(install_hint("statelink-fast", upgrade=True)) == expected


def test_from_a_checkout_as_it_was(installed: Installed) -> None:
    installed.came(dir_info={})
    path = f"{installed.checkout}/plugins/fast"
    assert shlex.split(install_hint("statelink-fast")) == ["pip", "install", path]
    assert shlex.split(install_hint("statelink-fast", upgrade=True)) == ["pip", "install", "-U", path]


def test_a_package_that_the_checkout_does_not_have(installed: Installed) -> None:
    installed.came(dir_info={"editable": True})
    assert install_hint("statelink-slow") == "pip install statelink-slow"
    assert install_hint("statelink-slow", upgrade=True) == "pip install -U statelink-slow"


def test_from_anywhere_else(installed: Installed) -> None:
    """A wheel, an index, a checkout that is gone, and files that say nothing."""
    by_name = "pip install 'statelink[plot]'"
    assert install_hint("statelink[plot]") == by_name
    installed.came(archive_info={})
    assert install_hint("statelink[plot]") == by_name
    installed.came(dir_info={}, url="https://example.org/statelink")
    assert install_hint("statelink[plot]") == by_name
    for text in ("", "{", "{}", '{"url": 5, "dir_info": {}}', '{"url": "file:///nowhere/core", "dir_info": {}}'):
        installed.broken(text)
        assert install_hint("statelink[plot]") == by_name
    installed.came(dir_info={})
    (installed.checkout / "core" / "pyproject.toml").write_text("[")
    assert install_hint("statelink[plot]") == by_name


PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/*/README.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_install_from_the_checkout(page: Path) -> None:
    """These packages are not published: what a page tells pip to install of them is a path. With -e, it always is."""
    for line in page.read_text().splitlines():
        for command in line.split("pip install")[1:]:
            words = shlex.split(command.partition("`")[0].replace('"', ""), comments=True)
            assert "-e" in words or not any(word.startswith("statelink") for word in words), line
