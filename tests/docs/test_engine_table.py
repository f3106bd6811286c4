"""The table of what the tests with an engine found says each test, its outcome and its time."""

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


def test_a_test_that_was_run_again_says_so() -> None:
    whole = report_of("SGLang", row_of("test_one", "passed"), row_of("test_two", "failed", "tokens"))
    report = replaced(whole, [report_of("SGLang", row_of("test_two", "passed", "tokens"))])
    text = render(report)
    assert "2 passed, in 0 minutes" in text
    assert "| tokens | 1 of `t.py` | passed |" in text
    assert "| one | passed | 1.0 |" in text
    assert "| two | passed: run again by name, since it failed in the whole run | 1.0 |" in text
