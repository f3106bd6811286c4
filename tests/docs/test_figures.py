"""The figures on the pages are those of `benchmarks/measured.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools import figures

if TYPE_CHECKING:
    import pytest


def test_the_pages_have_what_was_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["figures"])
    assert figures.main() == 0, capsys.readouterr().err


def test_every_table_is_on_a_page() -> None:
    marks = {name for page in figures.PAGES for _, name, _ in figures.MARKS.findall(page.read_text())}
    assert marks == set(figures.TABLES)
