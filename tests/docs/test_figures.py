"""The figures on the pages are those of `benchmarks/measured.json`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tools import figures

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SGLANG = {
    "handoff": [{"workload": "A", "sglang": "nixl", "ratio": "0.63 [0.60, 0.70]"}],
    "rooms": [],
    "mixed": [],
    "loop": [],
}


def test_the_pages_have_what_was_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["figures"])
    assert figures.main() == 0, capsys.readouterr().err


def test_every_table_is_on_a_page() -> None:
    marks = {name for page in figures.PAGES for _, name, _ in figures.MARKS.findall(page.read_text())}
    assert marks == set(figures.TABLES)


def test_a_folder_gets_a_page_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang.json").write_text(json.dumps(SGLANG))
    monkeypatch.setattr("sys.argv", ["figures", "--table", str(tmp_path)])
    assert figures.main() == 0
    text = (tmp_path / "table.md").read_text()
    assert "| one request of 8 MiB | 0.63 (0.60–0.70) | – |" in text
    assert "not measured" in text
