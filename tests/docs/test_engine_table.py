"""The table of what the tests with an engine found: what was shown, each file, and what did not pass at once."""

from __future__ import annotations

from typing import Any

from tools.engine_table import render, replaced


def row_of(name: str, outcome: str, *shows: str) -> dict[str, Any]:
    return {"file": "tests/t.py", "name": name, "outcome": outcome, "seconds": 1.0, "why": "", "shows": list(shows)}


def report_of(engine: str, *tests: dict[str, Any]) -> dict[str, Any]:
    files = {"tests/t.py": "Tests."}
    return {
        "engine": engine,
        "python": "3.11",
        "cores": 2,
        "versions": {},
        "seconds": 9.0,
        "files": files,
        "tests": list(tests),
    }


def test_a_statement_holds_if_every_test_that_shows_it_passed() -> None:
    tests = (
        row_of("test_one[a]", "passed", "tokens", "blocks"),
        row_of("test_one[b|c]", "failed", "tokens"),
        row_of("test_two", "skipped", "windows"),
    )
    text = render(report_of("vLLM", *tests))
    assert text.startswith("# What the tests with vLLM found\n\n`make engine-vllm` wrote this file")
    assert "| tokens | 2 of `t.py` | one: `b/c` failed |" in text
    assert "| blocks | 1 of `t.py` | passed |" in text
    assert "| windows | 1 of `t.py` | two skipped |" in text
    assert "| `t.py` | Tests. | 1 passed, 1 failed, 1 skipped | 3 |" in text
    assert text.endswith("\n- `t.py`, one: `b/c`: failed\n- `t.py`, two: skipped\n")


def test_a_test_that_was_run_again_is_named_if_it_failed_before() -> None:
    whole = report_of(
        "vLLM", row_of("test_one", "failed"), row_of("test_two", "passed"), row_of("test_three", "passed")
    )
    again = report_of(
        "vLLM", row_of("test_one", "passed"), row_of("test_two", "passed"), row_of("test_three", "failed")
    )
    text = render(replaced(whole, [again]))
    assert "| `t.py` | Tests. | 2 passed, 1 failed | 3 |" in text
    named = text.partition("## What did not pass at once\n\n")[2].splitlines()
    assert named == [
        "- `t.py`, one: passed: run again by name, since it failed in the whole run",
        "- `t.py`, three: failed",
    ]
