"""Runs the tests with every release of the engines that the adapters know, and with every two of them that may meet.

``python -m tools.engine_window [--only TEXT]... [--again]`` runs each release by itself, prefill of one release with
decode of another, and the two engines with each other at the edges of their windows. What each run found is kept in
``build/window.json``, so that some of the runs can be repeated, and the table is written to
``adapters/cross/RESULTS.md``. ``--again`` runs only what failed the last time, and the table says so of each test that
passes then. Exit status 1: a test failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "build" / "window.json"
TABLE = ROOT / "adapters" / "cross" / "RESULTS.md"
ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}

INTRO = """\
# What the tests with several releases found

`make engine-window` wrote this file. Each row is one run, with real engines on the CPU. A release by itself runs the
smoke tests and all that start servers. The newest releases run everything, and have results of their own
([SGLang](../sglang/RESULTS.md), [vLLM](../vllm/RESULTS.md)). Where prefill and decode are of different releases, the
tests compare the tokens with those of one server, also for models with recurrent state.

| run | tests | passed | failed | skipped | minutes | date |
|---|---|---|---|---|---|---|
"""


class Run(NamedTuple):
    """One run of tests.

    Attributes:
        name: What it shows.
        target: The target of the Makefile.
        variables: Variables of the Makefile, which name releases.
        choice: Which of the tests.
    """

    name: str
    target: str
    variables: dict[str, str]
    choice: str


def releases(engine: str) -> list[str]:
    """The versions of an engine that its adapter is tested with, from the oldest to the newest."""
    tests = ROOT / "adapters" / engine / "tests"
    newest = re.search(rf"^{engine}==(.*)$", (tests / "requirements.txt").read_text(), re.MULTILINE)
    assert newest is not None
    older = sorted((path.stem for path in (tests / "releases").glob("*.txt")), key=_numbers)
    return [*older, newest[1]]


def runs() -> Iterator[Run]:
    """All runs."""
    for engine, title in ENGINES.items():
        known = releases(engine)
        for version in known[:-1]:
            yield Run(f"{title} {version}", f"engine-{engine}", {"VERSION": version}, "-m 'smoke or servers'")
        for prefill, decode in itertools.permutations(known, 2):
            name = f"{title}: prefill {prefill}, decode {decode}"
            yield Run(name, f"engine-{engine}", {"PREFILL": prefill, "DECODE": decode}, "-m two_releases")
    sglang, vllm = releases("sglang"), releases("vllm")
    for one, other in ((sglang[0], vllm[0]), (sglang[0], vllm[-1]), (sglang[-1], vllm[0])):
        versions = {"SGLANG_VERSION": one, "VLLM_VERSION": other}
        yield Run(f"SGLang {one} and vLLM {other}, both ways", "engine-cross", versions, "-k test_tokens")


class Ran(NamedTuple):
    """What a run of tests said.

    Attributes:
        outcomes: ``passed``, ``skipped``, ``failure`` or ``error`` of each test, as ``module::name[parameters]``.
        status: The exit status of ``make``.
        seconds: How long pytest took.
    """

    outcomes: dict[str, str]
    status: int
    seconds: float

    def named(self, *outcomes: str) -> list[str]:
        """The tests that ended in one of these ways."""
        return [name for name, outcome in self.outcomes.items() if outcome in outcomes]


def ran(run: Run, folder: Path, again: Sequence[str] = ()) -> Ran:
    """Run the tests.

    Args:
        run: Which.
        folder: For pytest's report.
        again: Tests. Only these functions are run, with all of their parameters.
    """
    report = folder / "window.xml"
    report.unlink(missing_ok=True)
    given = [f"{name}={value}" for name, value in run.variables.items()]
    functions = sorted({tuple(name.partition("[")[0].split("::")) for name in again})
    chosen = f" -k '{' or '.join(' and '.join(each) for each in functions)}'" if again else ""
    command = ["make", run.target, *given, f"ARGS={run.choice}{chosen} --junitxml={report}"]
    print(f"=== {run.name}: {' '.join(command)}", flush=True)
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not report.exists():
        return Ran({}, status, 0.0)
    suite = next(iter(ElementTree.parse(report).getroot().iter("testsuite")))
    outcomes = {}
    for case in suite.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        ways = (each for each in ("failure", "error", "skipped") if case.find(each) is not None)
        outcomes[name] = next(ways, "passed")
    return Ran(outcomes, status, float(suite.get("time", 0)))


def done(run: Run, folder: Path) -> dict[str, Any]:
    """Run all tests of a run, and say what they found."""
    found = ran(run, folder)
    failures = found.named("failure", "error")
    if found.status and not failures:
        failures = [f"make ended with {found.status}"]  # no environment could be made, or no test was chosen
    date = time.strftime("%Y-%m-%d")
    counts = {"tests": len(found.outcomes), "skipped": found.named("skipped"), "failures": failures}
    return {**counts, "seconds": found.seconds, "date": date}


def run_again(run: Run, folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Run again what failed in a run, and say what is true of the whole run. A test that is not run stays a failure."""
    failed = before["failures"]
    if not failed:
        return before
    if not all("::" in name for name in failed):  # it had not come to its tests
        return done(run, folder)
    found = ran(run, folder, failed)
    passed, skipped = (set(found.named(outcome)) for outcome in ("passed", "skipped"))
    left = [name for name in failed if name not in passed | skipped]
    date = time.strftime("%Y-%m-%d")
    return {
        **before,
        "skipped": [*before["skipped"], *(name for name in failed if name in skipped)],
        "failures": list(dict.fromkeys([*left, *found.named("failure", "error")])),
        "again": [*before.get("again", ()), *((name, date) for name in failed if name in passed)],
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table of what was found, in the order of the runs."""
    rows, failures, again = [], [], []
    for run in runs():
        each = found.get(run.name)
        if each is None:
            rows.append(f"| {run.name} | not run | | | | | |")
            continue
        failed, skipped = len(each["failures"]), len(each["skipped"])
        passed = max(0, each["tests"] - failed - skipped)
        numbers = (each["tests"], passed, failed, skipped, f"{each['seconds'] / 60:.0f}", each["date"])
        rows.append(f"| {run.name} | {' | '.join(map(str, numbers))} |")
        failures += [f"- {run.name}: `{name}`" for name in each["failures"]]
        again += [f"- {run.name}: `{name}`, {date}" for name, date in each.get("again", ())]
    text = INTRO + "\n".join(rows) + "\n"
    repeated = "What failed in its run, and passed when it was run again"
    for title, lines in (("What failed", failures), (repeated, again)):
        text += f"\n## {title}\n\n" + "\n".join(lines) + "\n" if lines else ""
    return text


def _names(text: str, run: Run) -> bool:
    """Whether a text names a run: a whole name names that one alone, and a part of names all that have it."""
    return text == run.name if any(text == each.name for each in runs()) else text in run.name


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def main() -> None:
    """Run what was asked for, and write the table after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="a run, or the runs whose names have a text"
    )
    parser.add_argument("--again", action="store_true", help="run only what failed the last time")
    parser.add_argument("--list", action="store_true", help="say which runs there are, and run none")
    given = parser.parse_args()
    chosen = [run for run in runs() if not given.only or any(_names(text, run) for text in given.only)]
    if given.list:
        print(*(run.name for run in chosen), sep="\n")
        return
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    FOUND.parent.mkdir(exist_ok=True)
    for run in chosen:
        repeats = given.again and run.name in found
        found[run.name] = run_again(run, FOUND.parent, found[run.name]) if repeats else done(run, FOUND.parent)
        FOUND.write_text(json.dumps(found, indent=1))
        TABLE.write_text(table(found))
    failed = [run.name for run in chosen if found[run.name]["failures"]]
    print(f"{len(chosen)} runs; tests failed in {len(failed)}{': ' if failed else ''}{', '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
