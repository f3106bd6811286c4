"""What the user sees: a line for what the demo is at, and at the end a table and verdicts."""

from __future__ import annotations

from contextlib import contextmanager
from textwrap import indent
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from statelink_demo.demo import Say
    from statelink_demo.judge import RunReport

__all__ = ["print_reports", "progress"]

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
