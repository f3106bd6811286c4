"""``statelink conform``: tests one installed backend against every clause of the contract."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statelink.backend._interface import cannot_register
from statelink.cli import json_option, pair, print_json, seconds, temporary_folder
from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.registry import load_backend

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["conform"]

END_SECONDS = 20.0
"""Seconds that an interrupted kit has to end its processes."""
KIT = "statelink_conformance.conformance"
NOTHING_MATCHES = 5
"""pytest's exit status where no test is selected."""
ORDER = ("failed", "not run", "deviates", "passed", "not applicable")
"""Verdicts, worst first."""
STYLES = {"passed": "green", "failed": "bold red", "deviates": "yellow", "not run": "yellow", "not applicable": "dim"}


class _NothingRunError(click.ClickException):
    exit_code = click.UsageError.exit_code


@click.command()
@click.argument("name")
@click.option(
    "--option",
    "-o",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of the backend. VALUE is JSON, or else text.",
)
@click.option("--memory", default="dram", show_default=True, help="Move memory of this kind, such as cuda:0 or npu:0.")
@click.option(
    "--allocator",
    default="",
    metavar="MODULE:NAME",
    help="Allocate memory of a device with this function instead of torch.",
)
@json_option
@click.option(
    "-k",
    "expression",
    default="",
    metavar="EXPR",
    help="Run only clauses whose names or themes match, as pytest does: 'Fencing', 'Rooms and not aborted'.",
)
@click.option(
    "--patience",
    type=seconds(0.1),
    default=30.0,
    show_default=True,
    help="Wait this many seconds at most for the report of a failure, such as the death of a peer.",
)
@click.option("--exitfirst", "-x", is_flag=True, help="Stop at the first clause that fails.")
@click.option("--require", is_flag=True, help="Fail instead of skipping if the backend cannot run on this machine.")
@click.option("--verbose", "-v", is_flag=True, help="Show pytest's own output, with tracebacks of failures.")
@click.option(
    "--list", "listing", is_flag=True, help="List the clauses, by the names and themes that -k takes; run none."
)
def conform(
    name: str,
    pairs: tuple[str, ...],
    memory: str,
    allocator: str,
    as_json: bool,
    expression: str,
    patience: float,
    exitfirst: bool,
    require: bool,
    verbose: bool,
    listing: bool,
) -> None:
    """Test a backend against its contract.

    Runs every clause of the backend contract against backend NAME. Needs torch to allocate memory of a device. Exits
    with 0 if the backend keeps every clause that could be run, with 1 if it breaks one or does not load, and with 2 if
    it loads and no clause could be run.
    """
    options = dict(pair(each) for each in pairs)
    try:
        kind = load_backend(name)
        if listing:
            _list(as_json)
            return
        cause = cannot_register(kind, read_options(kind.Options, options, f"options of backend {name!r}"), memory)
    except StatelinkError as error:
        raise click.ClickException(str(error)) from error
    if cause:
        hint = "--memory says what to move; see `statelink backends`"
        raise click.ClickException(f"backend {name!r} cannot register memory of kind {memory!r}: {cause}\nhint: {hint}")
    with temporary_folder("statelink-conform-") as folder:
        report = folder / "report.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--pyargs",
            KIT,
            "-p",
            "statelink_conformance.plugin",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-c", os.devnull, "--rootdir", str(folder), "--import-mode", "importlib", "-m", "not soak"]
        command += [
            "--statelink-memory",
            memory,
            "--statelink-report",
            str(report),
            *(["--statelink-require"] if require else []),
        ]
        command += ["-k", expression] if expression else []
        command += ["--exitfirst"] if exitfirst else []
        command += ["--tb", "short"] if verbose else []
        environment = {
            **os.environ,
            "STATELINK_CONFORM_BACKEND": name,
            "STATELINK_CONFORM_OPTIONS": json.dumps(options),
            "STATELINK_CONFORM_ALLOCATOR": allocator,
            "STATELINK_CONFORM_PATIENCE": str(patience),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        # Tracebacks go to standard error if standard output is for the JSON.
        status, said = _run(command, environment, folder, shown=(2 if as_json else 1) if verbose else None)
        if not report.exists() or not (runs := json.loads(report.read_text())["runs"]):
            if status == NOTHING_MATCHES:
                hint = f"`statelink conform {name} --list` shows the names and themes"
                raise _NothingRunError(f"no clause was run: none matches {expression!r}\nhint: {hint}")
            raise _NothingRunError(f"no clause was run\n{said}".rstrip())
    clauses = runs[0]["clauses"]
    if as_json:
        print_json({"runs": runs})
    else:
        _show(name, clauses, runs[0]["untested"])
        if exitfirst and any(clause["verdict"] == "failed" for clause in clauses):
            click.echo("stopped at the first clause that failed; without -x, the others run, too")
    raise SystemExit(_verdict(clauses))


def _list(as_json: bool) -> None:
    """Print every clause of the contract that a run without ``-k`` has."""
    suite = importlib.import_module("statelink_conformance").BackendTests
    themes: dict[str, list[tuple[str, str]]] = {}
    for theme in reversed(suite.__mro__):
        for name, test in vars(theme).items():
            if name.startswith("test_") and all(mark.name != "soak" for mark in getattr(test, "pytestmark", ())):
                says = inspect.cleandoc(test.__doc__).rpartition("\n\n")[0]
                themes.setdefault(theme.__name__, []).append((name, " ".join(says.split())))
    if as_json:
        print_json([{"theme": theme, "name": name, "says": says} for theme in themes for name, says in themes[theme]])
        return
    for theme, clauses in themes.items():
        click.echo(theme)
        for name, says in clauses:
            click.echo(f"  {name}\n      {says}")


def _run(command: list[str], environment: dict[str, str], folder: Path, shown: int | None) -> tuple[int, str]:
    """Run the kit, and show its progress.

    Returns pytest's exit status, and what it printed, unless that went to the descriptor ``shown``.
    """
    reader, writer = os.pipe()
    with open(folder / "output.txt", "w+") as output, os.fdopen(reader) as lines:
        process = subprocess.Popen(
            [*command, "--statelink-progress", str(writer)],
            env=environment,
            pass_fds=[writer],
            stdout=output if shown is None else shown,
            stderr=subprocess.STDOUT,
            # In a session of its own, so that an interrupt at the terminal reaches it once: from here.
            start_new_session=True,
        )
        os.close(writer)
        try:
            _follow(lines)
        except BaseException:
            _interrupt(process)
            raise
        finally:
            process.wait()
        output.seek(0)
        return process.returncode, output.read()


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """End the kit. It gets time to end the processes of its clauses."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SECONDS)
    except BaseException:
        process.kill()
        raise


def _follow(lines: Iterable[str]) -> None:
    """Show the progress: in place on a terminal, otherwise with a line for each theme and each failure."""
    console, total, theme, names = Console(stderr=True), 0, "", set[str]()
    with console.status("collecting the clauses") if console.is_terminal else nullcontext() as status:
        for line in lines:
            told = json.loads(line)
            if isinstance(told, int):
                total = told
                continue
            names.add(told["name"])  # a clause that fails, and fails again in its clean-up, comes twice
            text = f"{len(names)} of {total}: {told['theme']}"
            if told["verdict"] == "failed":
                console.print(Text(f"{text}: {told['name']} failed", style=STYLES["failed"]))
            elif status is not None:
                status.update(Text(f"{text}: {told['says']}"))
            elif told["theme"] != theme:
                console.print(text, highlight=False)
            theme = told["theme"]


def _verdict(clauses: list[dict[str, Any]]) -> int:
    """The exit status."""
    counts = Counter(clause["verdict"] for clause in clauses)
    return 1 if counts["failed"] else 0 if counts["passed"] else 2


def _show(name: str, clauses: list[dict[str, Any]], untested: list[str]) -> None:
    """Print a summary, with the kinds of memory that are declared and were not moved."""
    console = Console()
    sentences: dict[tuple[str, str], Counter[str]] = {}
    for clause in clauses:
        sentences.setdefault((clause["theme"], clause["says"]), Counter())[clause["verdict"]] += 1
    table, theme = Table(box=None, pad_edge=False, show_header=False), ""
    for (about, says), verdicts in sentences.items():
        if about != theme:
            theme = about
            table.add_row(Text(about, style="bold"), "")
        counted = [each for each in ORDER if verdicts[each]]
        alone = sum(verdicts.values()) == 1
        said = ",\n".join(each if alone else f"{each} {verdicts[each]}" for each in counted)
        table.add_row(Text(f"  {says}"), Text(said, style=STYLES[counted[0]]))
    console.print(table)
    for verdict in ("deviates", "failed"):
        groups: dict[str, list[dict[str, Any]]] = {}
        for clause in clauses:
            if clause["verdict"] == verdict:
                groups.setdefault(clause["like"] or clause["name"], []).append(clause)
        for group in groups.values():
            _explain(console, group)
    for reason in sorted({clause["reason"] for clause in clauses if clause["verdict"] == "not run"}):
        console.print(Text(f"\nnot run: {reason}", style=STYLES["not run"]))
    for kind in untested:
        console.print(Text(f"\ndeclared kind {kind}: not tested here; --memory moves it", style=STYLES["not run"]))
    counts = Counter(clause["verdict"] for clause in clauses)
    seconds = sum(clause["seconds"] for clause in clauses)
    console.print(Text(f"\n{name}: {', '.join(f'{n} {what}' for what, n in counts.most_common())} in {seconds:.0f} s"))


def _explain(console: Console, group: list[dict[str, Any]]) -> None:
    """Print the common reason of clauses that failed or deviate, and the first clause's text and hint."""
    first, count = group[0], len(group)
    names = ", ".join(clause["name"] for clause in group[:3]) + (f", and {count - 3} more" if count > 3 else "")
    console.print(Text(f"\n{first['verdict']}: {names}", style=STYLES[first["verdict"]]))
    of = "" if count == 1 else ", of the first"
    console.print(Text(f"  the contract{of}: {first['says']}"))
    found = "\n".join(f"  {line}" for line in first["reason"].splitlines()[:12])
    console.print(Text(f"  found: {found.strip()}"))
    same = _first_line(first)
    others = [clause for clause in group if _first_line(clause) != same]  # they differ in numbers
    for clause in others[:3]:
        console.print(Text(f"  found by {clause['name']}: {_first_line(clause)}"))
    if len(others) > 3:
        console.print(Text(f"  found by {len(others) - 3} more: the same with other numbers"))
    if first["todo"]:
        console.print(Text(f"  what to do: {first['todo']}"))


def _first_line(clause: dict[str, Any]) -> str:
    return str(clause["reason"]).partition("\n")[0]
