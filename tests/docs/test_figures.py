"""The figures on the pages are those of `benchmarks/measured.json`, and the tool takes what benchmarks write."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tools import figures

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ROWS = [
    {"suite": "rooms", "backend": "tcp", "in_flight": 64, "busy": "none", "rooms_per_s": 2270, "median_ms": 9.0,
     "prefill_cpu_ms": 0.3, "decode_cpu_ms": 0.25},
    {"suite": "handoff", "backend": "nixl", "workload": "A", "busy": "prefill", "busy_ms": 12.0,
     "over_raw": [1.2, 1.1, 1.3], "over_floor": [2.0, 1.9, 2.1], "busy_over_quiet": [2.5, 2.4, 2.6]},
    {"suite": "handoff", "backend": "nixl", "workload": "A", "busy": "prefill", "switch_interval": 0.001,
     "busy_ms": 5.0, "busy_over_quiet": [1.5, 1.4, 1.6]},
]  # fmt: skip
SGLANG = {
    "handoff": [{"workload": "A", "sglang": "nixl", "ratio": "0.63 [0.60, 0.70]"}],
    "rooms": [],
    "mixed": [
        {"workload": "2x512", "sglang": "nixl", "ratio": "0.02 [0.01, 0.03]", "alone_ms": [1.0, 5.0],
         "beside_ms": [4.0, 440.0], "beside_p99_ms": [9.0, 1500.0], "large_ms": [200.0, 400.0],
         "large_ratio": "0.50 [0.45, 0.55]"},
    ],
    "loop": [],
}  # fmt: skip


def cells_of(table: str) -> dict[str, list[str]]:
    """Each row's cells, by what the row is about."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {first: rest for first, *rest in rows}


def test_the_pages_have_what_was_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["figures"])
    assert figures.main() == 0, capsys.readouterr().err


def test_every_table_is_on_a_page() -> None:
    marks = {name for page in figures.PAGES for _, name, _ in figures.MARKS.findall(page.read_text())}
    assert marks == set(figures.TABLES)


def test_a_cell_is_the_median_and_its_bounds_or_a_dash() -> None:
    found = {"core": {"rows": ROWS}, "sglang": SGLANG}
    mix = "a request of 1 MiB beside two of 512 MiB"
    assert cells_of(figures.sglang_short(found))[mix] == ["0.02 (0.01–0.03)", "–"]
    assert cells_of(figures.sglang_mixed(found)) == {
        f"NIXL, {mix}": ["1.0, 5.0 ms", "4.0, 440.0 ms", "9.0, 1,500.0 ms", "200.0, 400.0 ms", "0.50 (0.45–0.55)"]
    }
    assert cells_of(figures.sglang(found))["one request of 8 MiB"] == ["0.63 (0.60–0.70)", "–"]
    assert cells_of(figures.large(found))["A, one request of 8 MiB"] == ["–", "1.20 (1.10–1.30)", "–"]
    assert cells_of(figures.small(found))["small requests, 64 in flight, quiet"] == ["2,270 a second", "–", "–"]
    beside = cells_of(figures.busy(found))
    assert beside["A, Python in the sending process"] == ["–", "12.0 ms, 2.50 (2.40–2.60)", "–"]
    shorter = "A, Python in the sending process, with a switch interval of 1 ms"
    assert beside[shorter] == ["–", "5.0 ms, 1.50 (1.40–1.60)", "–"]


def test_a_loop_loses_its_time_beyond_turns_without_a_connector() -> None:
    row: dict[str, object] = {"sglang": "nixl", "in_flight": 16, "request_us": [900, 1500]}
    for role, turn in (("prefill", 2900), ("decode", 3000)):
        row |= {f"{role}_turn_us": [turn, turn + 20], f"{role}_idle_turn_us": [turn + 100, turn + 1100]}
        row |= {f"{role}_{what}_us": [200, 2400] for what in ("lost", "added")}
        row |= {f"{role}_{what}_ratio": "0.50 [0.40, 0.60]" for what in ("lost", "added")}
    found = {"sglang": {**SGLANG, "loop": [row]}}
    ratios = ["0.50 (0.40–0.60)"] * 4
    lost = ["200 µs, 2.40 ms"] * 2
    assert cells_of(figures.sglang_loop(found)) == {"NIXL, 16 in flight": ["900 µs, 1.50 ms", *lost, *ratios]}
    assert cells_of(figures.sglang_turn(found)) == {
        "NIXL, prefill": ["2.91 ms", "3.00 ms", "4.00 ms"],
        "NIXL, decode": ["3.01 ms", "3.10 ms", "4.10 ms"],
    }


def test_a_page_is_written_between_its_marks_alone() -> None:
    page = "before\n<!-- figures: sglang -->\nstale\n<!-- figures: end -->\nafter 9.9 ms\n"
    made = figures.replaced(page, {"sglang": SGLANG})
    assert made.startswith("before\n<!-- figures: sglang -->\n")
    assert made.endswith("<!-- figures: end -->\nafter 9.9 ms\n")
    assert "stale" not in made
    assert "0.63 (0.60–0.70)" in made
    assert figures.replaced(made, {"sglang": SGLANG}) == made


def test_what_benchmarks_leave_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part at a time: what was not measured anew stays."""
    monkeypatch.setattr(figures, "MEASURED", tmp_path / "measured.json")
    monkeypatch.setattr(figures, "PAGES", [])
    for name, given in (("results.json", {"rows": ROWS}), ("sglang.json", SGLANG)):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(json.dumps(given))
        monkeypatch.setattr("sys.argv", ["figures", "--take", str(folder)])
        assert figures.main() == 0
    text = (tmp_path / "measured.json").read_text()
    assert json.loads(text) == {"core": {"rows": ROWS}, "sglang": SGLANG}
    assert len(re.findall(r"^ .*\"backend\": \"tcp\".*\"decode_cpu_ms\".*$", text, re.MULTILINE)) == 1


def test_a_folder_gets_a_page_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang.json").write_text(json.dumps(SGLANG))
    monkeypatch.setattr("sys.argv", ["figures", "--table", str(tmp_path)])
    assert figures.main() == 0
    text = (tmp_path / "table.md").read_text()
    assert "| one request of 8 MiB | 0.63 (0.60–0.70) | – |" in text
    assert "not measured" in text
