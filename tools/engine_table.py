"""The table of what the tests with an engine found, made from their report.

``python -m tools.engine_table REPORT... FILE`` writes it to a Markdown file. The first report is that of a whole run.
The others are of tests that failed in it and were run again, by name. The table says so of each of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INTRO = """\
# What the tests with {engine} found

`make engine-{target}` wrote this file, from the report of one whole run. Tests that did not pass at once are named at
the end; the words after a name are its parameters. The seconds include those that servers take to start.
"""


def render(report: dict[str, Any]) -> str:
    """The file."""
    tests = report["tests"]
    versions = ", ".join(f"{name} {found}" for name, found in report["versions"].items() if found != "none")
    lines = [
        INTRO.format(engine=report["engine"], target=report["engine"].lower()),
        f"{_counts(tests)}, in {report['seconds'] / 60:.0f} minutes on {report['cores']} cores, "
        f"with Python {report['python']}, {versions}.",
        "",
        *_shown(tests),
        *_files(report),
        *_named(tests),
    ]
    return "\n".join(lines) + "\n"


def _shown(tests: list[dict[str, Any]]) -> Iterator[str]:
    """A row for each statement that tests are there to show. It holds if all of them passed."""
    statements = dict.fromkeys(text for test in tests for text in test["shows"])
    if not statements:
        return
    yield "## What was to be shown"
    yield ""
    yield "| | tests | outcome |"
    yield "|---|---|---|"
    for text in statements:
        found = [test for test in tests if text in test["shows"]]
        files = sorted({Path(test["file"]).name for test in found})
        others = [f"{_words(test['name'])} {test['outcome']}" for test in found if test["outcome"] != "passed"]
        outcome = "; ".join(others).replace("|", "/") or "passed"
        yield f"| {text} | {len(found)} of {', '.join(f'`{file}`' for file in files)} | {outcome} |"
    yield ""


def _files(report: dict[str, Any]) -> Iterator[str]:
    """A row for each file of tests."""
    yield "## What each file found"
    yield ""
    yield "| file | tests of | outcome | seconds |"
    yield "|---|---|---|---|"
    for file, text in report["files"].items():
        tests = [test for test in report["tests"] if test["file"] == file]
        if tests:
            seconds = sum(test["seconds"] for test in tests)
            yield f"| `{Path(file).name}` | {text.rstrip().replace('|', '/')} | {_counts(tests)} | {seconds:.0f} |"


def _named(tests: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each test that did not pass, or not at once."""
    others = [test for test in tests if test["outcome"] != "passed" or test["why"]]
    if not others:
        return
    yield ""
    yield "## What did not pass at once"
    yield ""
    for test in others:
        why = f": {test['why']}" if test["why"] else ""
        yield f"- `{Path(test['file']).name}`, {_words(test['name'])}: {test['outcome']}{why}"


def _counts(tests: list[dict[str, Any]]) -> str:
    outcomes = [test["outcome"] for test in tests]
    kinds = ("passed", "failed", "skipped")
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in kinds if kind in outcomes)


def replaced(whole: dict[str, Any], again: list[dict[str, Any]]) -> dict[str, Any]:
    """A report with the outcomes of tests that were run again."""
    later = {(test["file"], test["name"]): test for report in again for test in report["tests"]}
    tests = []
    for test in whole["tests"]:
        found = later.get((test["file"], test["name"]))
        if found is not None and test["outcome"] != "passed":
            found = {**found, "why": found["why"] or f"run again by name, since it {test['outcome']} in the whole run"}
        tests.append(found or test)
    return {**whole, "tests": tests}


def _words(name: str) -> str:
    """A test's name as words."""
    function, _, parameters = name.rpartition("::")[2].partition("[")
    text = function.removeprefix("test_").replace("_", " ")
    return text + (f": `{parameters.removesuffix(']')}`".replace("|", "/") if parameters else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="+")
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    whole, *again = (json.loads(each.read_text()) for each in given.report)
    given.file.write_text(render(replaced(whole, again)))


if __name__ == "__main__":
    main()
