"""``statelink doctor``: says whether this machine can move state, and if not, what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statelink.backend import Check, Verdict
from statelink.opening import AUTO
from statelink.registry import list_backends

from ._checks import checked_alone
from ._configured import Configured, configured
from ._examination import Asked, examine, failed
from ._loopback import Meant, Transfer, loopback
from ._machine import look
from ._output import json_option, print_json
from ._values import pair
from ._words import counted

__all__ = ["doctor"]

STYLES = {Verdict.OK: "green", Verdict.PROBLEM: "bold red", Verdict.NOT_APPLICABLE: "dim"}


@click.command()
@click.argument("name", required=False)
@click.option(
    "--option",
    "-o",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of backend NAME. VALUE is JSON, or else text.",
)
@click.option(
    "--memory", default="", metavar="KIND", help="Move memory of this kind over backend NAME.  [default: dram]"
)
@click.option(
    "--allocator",
    default="",
    metavar="MODULE:NAME",
    help="Allocate memory of a device with this function instead of torch.",
)
@click.option(
    "--loopback/--no-loopback",
    "transfer",
    default=True,
    help="Move bytes from this machine to itself, over each backend.",
)
@json_option
def doctor(
    name: str | None, pairs: tuple[str, ...], memory: str, allocator: str, transfer: bool, as_json: bool
) -> None:
    """Check this machine and its backends.

    Checks backend NAME, or every installed one, up to a real transfer. Each line is ok, a problem with a hint, or not
    applicable here. Exits with 1 if there is a problem, otherwise with 0. A backend that cannot run on this machine is
    a problem if it is NAME, or if the configuration names it.
    """
    if (pairs or memory) and name is None:
        raise click.UsageError("--option and --memory need a backend NAME")
    options = dict(pair(each) for each in pairs)
    found = configured()
    wanted = _wanted(found)
    names = [name] if name else sorted({each.name for each in list_backends()} | wanted.keys())
    meant = {name: ""} if name else wanted
    console = Console()
    seen: list[tuple[str, Check]] = []

    def checks(about: str) -> Iterable[Check]:
        if about == "machine":
            return look(found)
        if about == AUTO:
            return _auto(seen)
        moved = Meant(memory, allocator) if transfer else None
        return _backend(about, lambda: examine(about, Asked.of(about, found, options), moved, meant), moved)

    chosen = name is None and found.given is not None and found.given.config.backend == AUTO
    for about in ("machine", *names, *((AUTO,) if chosen else ())):
        rows = []
        for check in checks(about):
            rows.append(check)
            seen.append((about, check))
        if not as_json:
            _print(console, about, rows)
    counts = Counter(check.verdict for _, check in seen)
    if as_json:
        _write(seen, not counts[Verdict.PROBLEM])
    else:
        console.print(Text(", ".join(_counted(verdict, counts[verdict]) for verdict in Verdict)))
    raise SystemExit(1 if counts[Verdict.PROBLEM] else 0)


def _counted(verdict: Verdict, count: int) -> str:
    return counted(count, verdict.value) if verdict is Verdict.PROBLEM else f"{count} {verdict.value}"


def _wanted(found: Configured) -> dict[str, str]:
    """The backend that the configuration in the environment names, and the variable or the file that names it."""
    if found.given is None or found.given.config.backend == AUTO:
        return {}
    return {found.given.config.backend: found.place("backend")}


def _backend(name: str, work: Callable[[], Iterable[Check | Transfer]], moved: Meant | None) -> Iterator[Check]:
    """Check a backend in a process of its own, and then move bytes over it."""
    for each in checked_alone(work, "importing or probing it", "backend", "probe"):
        yield loopback(each, moved or Meant()) if isinstance(each, Transfer) else each


def _auto(seen: Sequence[tuple[str, Check]]) -> Iterator[Check]:
    """Whether ``auto`` has a backend to take, by the checks of all of them."""
    probed = {about for about, check in seen if check.what == "probe" and check.verdict is Verdict.OK}
    asked = ("role", "require")
    refused = {about for about, check in seen if check.what in asked and check.verdict is not Verdict.OK}
    if usable := sorted(probed - refused):
        yield Check(what="backend", verdict=Verdict.OK, found=f"it may take {', '.join(usable)}")
    else:
        found = "no installed backend can run here and do what the configuration asks"
        yield failed("backend", found, "the lines of each backend say why", "backend.none")


def _write(seen: list[tuple[str, Check]], fine: bool) -> None:
    checks = [
        {
            "about": about,
            "what": each.what,
            "verdict": each.verdict.value,
            "found": each.found,
            "hint": each.hint,
            "code": each.code,
        }
        for about, each in seen
    ]
    print_json({"ok": fine, "checks": checks})


def _print(console: Console, about: str, rows: list[Check]) -> None:
    console.print(Text(about, style="bold"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in rows:
        # As text, not markup, because texts of libraries may contain brackets.
        hint = "" if check.verdict is Verdict.OK else check.hint
        found = f"{check.found} [{check.code}]" if check.code else check.found
        found += f"\nhint: {hint}" if hint else ""
        table.add_row(Text(f"  {check.what}"), Text(check.verdict.value, style=STYLES[check.verdict]), Text(found))
    console.print(table)
    console.print()
