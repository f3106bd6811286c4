"""``statelink conform``: every clause of the backend contract, against one installed backend."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statelink.backend._interface import cannot_register
from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.registry import load_backend

from ._pairs import pair

__all__ = ["conform"]

KIT = "statelink.testing.conformance"
STYLES = {"passed": "green", "failed": "bold red", "deviates": "yellow", "not run": "yellow", "not applicable": "dim"}


@click.command()
@click.argument("name")
@click.option(
    "--option", "-o", "pairs", multiple=True, metavar="KEY=VALUE", help="An option of the backend; JSON values."
)
@click.option("--memory", default="dram", show_default=True, help="Kind of memory to move, such as cuda:0 or npu:0.")
@click.option(
    "--allocator", default="", metavar="MODULE:NAME", help="What allocates that of a device, instead of torch."
)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write what was found as JSON.")
@click.option(
    "-k", "expression", default="", metavar="EXPR", help="Run only clauses whose names match, as pytest does."
)
@click.option("--require", is_flag=True, help="Fail, rather than skip, where the backend cannot run on this machine.")
@click.option("--verbose", "-v", is_flag=True, help="Show pytest's own output, with the tracebacks of what failed.")
def conform(
    name: str,
    pairs: tuple[str, ...],
    memory: str,
    allocator: str,
    path: Path | None,
    expression: str,
    require: bool,
    verbose: bool,
) -> None:
    """Run every clause of the backend contract against backend NAME.

    Needs the extra `statelink[testing]`, and for memory of a device torch, which allocates it. Exits with 0 if every
    clause that could be run was kept, with 1 if one was broken, and with 2 if none could be run.
    """
    if importlib.util.find_spec("pytest") is None:
        raise click.ClickException("the conformance kit needs pytest\nhint: pip install 'statelink[testing]'")
    options = dict(pair(each) for each in pairs)
    try:
        kind = load_backend(name)
        cause = cannot_register(kind, read_options(kind.Options, options, f"options of backend {name!r}"), memory)
    except StatelinkError as error:
        raise click.ClickException(str(error)) from error
    if cause:
        hint = "--memory says what to move; see `statelink backends`"
        raise click.ClickException(f"backend {name!r} cannot register memory of kind {memory!r}: {cause}\nhint: {hint}")
    with tempfile.TemporaryDirectory(prefix="statelink-conform-") as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--pyargs",
            KIT,
            "-p",
            "statelink.testing.plugin",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-c", os.devnull, "--rootdir", folder, "--import-mode", "importlib", "-m", "not soak"]
        command += [
            "--statelink-memory",
            memory,
            "--statelink-report",
            str(report),
            *(["--statelink-require"] if require else []),
        ]
        command += ["-k", expression] if expression else []
        environment = {
            **os.environ,
            "STATELINK_CONFORM_BACKEND": name,
            "STATELINK_CONFORM_OPTIONS": json.dumps(options),
            "STATELINK_CONFORM_ALLOCATOR": allocator,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        done = subprocess.run(command, env=environment, capture_output=not verbose, text=True, check=False)
        if not report.exists() or not (runs := json.loads(report.read_text())["runs"]):
            raise click.ClickException(f"no clause was run\n{done.stdout or ''}{done.stderr or ''}".rstrip())
        if path is not None:
            path.write_bytes(report.read_bytes())
    raise SystemExit(_show(name, runs[0]["clauses"]))


def _show(name: str, clauses: list[dict[str, Any]]) -> int:
    """Print a summary; the exit status."""
    console = Console()
    sentences: dict[tuple[str, str], Counter[str]] = {}
    for clause in clauses:
        sentences.setdefault((clause["theme"], clause["says"]), Counter())[clause["verdict"]] += 1
    table, theme = Table(box=None, pad_edge=False, show_header=False), ""
    for (about, says), verdicts in sentences.items():
        if about != theme:
            theme = about
            table.add_row(Text(about, style="bold"), "")
        worst = next(each for each in ("failed", "not run", "deviates", "passed", "not applicable") if verdicts[each])
        total = sum(verdicts.values())
        count = f" {verdicts[worst]} of {total}" if 1 < total != verdicts[worst] else f" {total}" if total > 1 else ""
        table.add_row(Text(f"  {says}"), Text(f"{worst}{count}", style=STYLES[worst]))
    console.print(table)
    for clause in clauses:
        if clause["verdict"] in ("failed", "deviates"):
            title = Text(f"\n{clause['verdict']}: {clause['name']}", style=STYLES[clause["verdict"]])
            console.print(title, Text("\n".join(f"  {line}" for line in clause["reason"].splitlines()[:12])), sep="\n")
    for reason in sorted({clause["reason"] for clause in clauses if clause["verdict"] == "not run"}):
        console.print(Text(f"\nnot run: {reason}", style=STYLES["not run"]))
    counts = Counter(clause["verdict"] for clause in clauses)
    seconds = sum(clause["seconds"] for clause in clauses)
    console.print(Text(f"\n{name}: {', '.join(f'{n} {what}' for what, n in counts.most_common())} in {seconds:.0f} s"))
    return 1 if counts["failed"] else 0 if counts["passed"] else 2
