"""`statelink demo`: the command that this package adds, and what its user sees."""

from __future__ import annotations

import io
import json
import sys
from contextlib import contextmanager
from textwrap import indent
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

import statelink
from statelink.errors import StatelinkError
from statelink_demo.demo import run_demo
from statelink_demo.judge import judge
from statelink_demo.messages import Settings
from statelink_demo.processes import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statelink_demo.demo import Say
    from statelink_demo.judge import RunReport

__all__ = ["demo", "print_reports", "progress"]


@click.command(short_help="Hand over requests of a small model.")
@click.option("--backend", default="tcp", show_default=True, help="Use this installed backend.")
@click.option(
    "--requests", type=click.IntRange(1, 256), default=4, show_default=True, help="Send this many requests at once."
)
@click.option(
    "--tokens", type=click.IntRange(1, 1024), default=32, show_default=True, help="Generate this many tokens."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Draw weights and prompts from this seed."
)
@click.option(
    "--by-layer/--no-by-layer",
    default=None,
    help="Push by layers during the forward pass, or by chunks after it. Both, one after the other, if not given.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=120.0,
    show_default=True,
    help="Give up after so many seconds of a request, or of silence.",
)
@click.option("--plain", is_flag=True, help="Print a line for each step, on a terminal too.")
@click.option("--json", "as_json", is_flag=True, help="Print a report for scripts, and nothing else.")
@click.option(
    "--sabotage",
    multiple=True,
    metavar="POOL",
    help="Self-test: zero this pool (k.3, conv.0, counts, ...) of one more request on decode, once it has arrived. "
    "The demo must then fail. Repeatable.",
)
def demo(
    backend: str,
    requests: int,
    tokens: int,
    seed: int,
    by_layer: bool | None,
    timeout: float,
    plain: bool,
    as_json: bool,
    sabotage: tuple[str, ...],
) -> None:
    """Hand requests of a small hybrid model from a prefill process to a decode process.

    Decode never sees a prompt: it generates from the state that Statelink moved. A third process runs the same model
    with nothing moved, and what decode generates must be the same, bit for bit.
    """
    if len(sabotage) > requests:
        raise click.UsageError(f"{len(sabotage)} pools to sabotage, one a request, and only {requests} requests")
    settings = Settings(
        backend=backend,
        requests=requests,
        tokens=tokens,
        seed=seed,
        modes=(False, True) if by_layer is None else (by_layer,),
        timeout=timeout,
        sabotage=sabotage,
    )
    console = Console()
    try:
        if backend not in {"auto", *(listed.name for listed in statelink.list_backends())}:
            statelink.probe(backend)  # says at once, and not after loading a model, that there is none, and what to do
        with progress(Console(file=io.StringIO()) if as_json else console, plain=plain) as say:
            runs = run_demo(settings, say)
    except (StatelinkError, DemoError) as error:
        raise click.ClickException(str(error)) from error
    reports = [judge(run) for run in runs]
    ok = all(report.ok for report in reports) and len(reports) == len(settings.modes)
    if as_json:
        click.echo(_json(settings, reports, ok))
    else:
        print_reports(console, reports, backend, tokens)
    if not ok:
        sys.exit(1)


def _json(settings: Settings, reports: list[RunReport], ok: bool) -> str:
    content = {
        "backend": settings.backend,
        "tokens": settings.tokens,
        "seed": settings.seed,
        "ok": ok,
        "runs": msgspec.to_builtins(reports),
    }
    return json.dumps(content, indent=2)


_CAPTION = "ms: mean, from a component's last push until decode could use the request"


@contextmanager
def progress(console: Console, *, plain: bool) -> Iterator[Say]:
    """Show one line that changes on a terminal, and a line for each step elsewhere."""
    if plain or not console.is_terminal:
        yield lambda line: _say(console, Text(line))
    else:
        with console.status("") as status:
            yield lambda line: status.update(Text(line))


def print_reports(console: Console, reports: Sequence[RunReport], backend: str, tokens: int) -> None:
    """Print what moved, what went wrong, and a verdict for every run."""
    console.print(_table(reports, backend))
    _say(console, Text(_CAPTION, style="italic"))
    for report in reports:
        good = sum(verdict.ok for verdict in report.verdicts)
        if report.ok:
            mark, style = "ok", "bold green"
            said = f"as in one process: first-step logits bit-equal, {tokens} tokens identical"
        else:
            mark, style = "WRONG", "bold red"
            said = "not as in one process, or without an answer"
        count = f"{good if report.ok else len(report.verdicts) - good} of {len(report.verdicts)} requests"
        _say(console, Text.assemble((f"{mark:5} ", style), f"{report.title}: {count} {said}"))
        for verdict in report.verdicts:
            for problem in verdict.problems:
                said = indent(problem, "    ").lstrip()
                _say(console, Text(f"  request {verdict.request} (room {verdict.room}): {said}"))


def _say(console: Console, text: Text) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _table(reports: Sequence[RunReport], backend: str) -> Table:
    table = Table(title=f"moved from prefill to decode over {backend}", title_justify="left")
    table.add_column("run, component")
    for name in ("bytes", "blocks", "pushes", "ms"):
        table.add_column(name, justify="right")
    for report in reports:
        table.add_row(Text(report.title, style="bold"))
        for name, part in report.components.items():
            table.add_row(f"  {name}", f"{part.nbytes:,}", f"{part.blocks:,}", f"{part.pushes:,}", f"{part.ms:.1f}")
        if not report.components:
            table.add_row("  nothing", "0", "0", "0", "")
        table.add_section()
    return table
