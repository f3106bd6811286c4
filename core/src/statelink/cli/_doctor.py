"""``statelink doctor``: says whether this machine can move state, and if not, what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statelink._select import AUTO, check_options, check_transport
from statelink.backend import Backend, Check, Diagnosing, Verdict
from statelink.config import LinkConfig, read_options
from statelink.errors import StatelinkError, UnknownBackendError
from statelink.registry import list_backends, load_backend, probed

from ._configured import Configured, configured
from ._loopback import Meant, loopback
from ._machine import look
from ._output import json_option, print_json
from ._pairs import pair
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
        return _backend(about, Asked.of(about, found, options), moved, meant)

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


class Asked(NamedTuple):
    """What a link would ask of one backend.

    Attributes:
        options: Its options: those of the configuration, and over them those of the command.
        config: The configuration. ``None`` if it does not concern this backend.
    """

    options: dict[str, Any]
    config: LinkConfig | None = None

    @classmethod
    def of(cls, name: str, found: Configured, given: Mapping[str, Any]) -> Asked:
        """What is configured for backend ``name``, with the options of the command."""
        if found.given is None or found.given.config.backend not in (AUTO, name):
            return cls(dict(given))
        config = found.given.config
        options = config.options.get(name, {}) if config.backend == AUTO else config.options
        try:
            check_options(found.given)
        except StatelinkError:  # a problem of the configuration, or of another backend; here, the defaults are checked
            options = {}
        return cls({**options, **given}, config)


def _counted(verdict: Verdict, count: int) -> str:
    return counted(count, verdict.value) if verdict is Verdict.PROBLEM else f"{count} {verdict.value}"


def _wanted(found: Configured) -> dict[str, str]:
    """The backend that the configuration in the environment names, and the variable or the file that names it."""
    if found.given is None or found.given.config.backend == AUTO:
        return {}
    return {found.given.config.backend: found.place("backend")}


def _backend(name: str, asked: Asked, moved: Meant | None, meant: Mapping[str, str]) -> Iterator[Check]:
    """Check a backend, from its package to a transfer. Stops at the first check on which the others depend.

    If nobody wants to use the backend, it is no problem that it cannot run, because hosts often have all packages.

    Args:
        name: The backend's name.
        asked: Its options, and the configuration.
        moved: The memory for a transfer. ``None``: no transfer.
        meant: The backend that somebody wants to use, and where its name stands if it is in no argument.
    """
    listed = [each for each in list_backends() if each.name == name]
    try:
        kind = load_backend(name, listed or None)
        parsed = read_options(kind.Options, asked.options, f"options of backend {name!r}")
    except StatelinkError as error:
        found = str(error).partition("\nhint:")[0]
        if isinstance(error, UnknownBackendError) and meant.get(name):
            found = f"backend {name!r} (from {meant[name]}) is not installed"
        yield _failed("backend", found, error.hint, error.code)
        return
    priority = f"priority {kind.capabilities.priority}"
    yield Check(what="backend", verdict=Verdict.OK, found=f"{listed[0]}; {priority}")
    looked, defects = _diagnosed(kind, parsed)
    try:
        probe = probed(kind, parsed)
    except StatelinkError as error:
        yield from (*looked, *defects, _failed("probe", error.reason.cause, error.hint, error.code))
        return
    lacks = Verdict.PROBLEM if name in meant else Verdict.NOT_APPLICABLE
    if not probe.ok:
        looked = [replace(each, verdict=lacks) if each.verdict is Verdict.PROBLEM else each for each in looked]
    yield from (*looked, *defects)
    if not probe.ok:
        said = f"not usable here: {probe.reason}"
        code = "backend.unavailable" if lacks is Verdict.PROBLEM else ""
        yield Check(what="probe", verdict=lacks, found=said, hint=probe.hint, code=code)
        found = "the backend cannot run here"
        yield Check(what="loopback transfer", verdict=Verdict.NOT_APPLICABLE, found=found)
        return
    yield Check(what="probe", verdict=Verdict.OK, found=probe.reason)
    yield Check(what="stopped peers", verdict=Verdict.OK, found=_stalled(kind))
    refused = list(_refused(kind, parsed, asked.config, lacks))
    yield from refused
    if any(each.verdict is not Verdict.OK for each in refused):
        found = "no link opens over it with this configuration"
        yield Check(what="loopback transfer", verdict=Verdict.NOT_APPLICABLE, found=found)
    elif moved is not None:
        yield loopback(kind, asked.options, moved, require=asked.config.require if asked.config else ())


def _refused(kind: type[Backend], options: Any, config: LinkConfig | None, lacks: Verdict) -> Iterator[Check]:
    """Check what the configuration asks of the backend. ``lacks`` is the verdict if the backend cannot do it."""
    if config is None:
        return
    try:
        check_transport(kind, options, config)
    except StatelinkError as error:
        what = "role" if error.code == "backend.roles" else "require"
        yield Check(what=what, verdict=lacks, found=error.reason.clause, hint=error.hint, code=error.code)
        return
    if config.require:
        found = f"it may use {' or '.join(config.require)}"
        yield Check(what="require", verdict=Verdict.OK, found=found)


def _auto(seen: Sequence[tuple[str, Check]]) -> Iterator[Check]:
    """Whether ``auto`` has a backend to take, by the checks of all of them."""
    probed = {about for about, check in seen if check.what == "probe" and check.verdict is Verdict.OK}
    asked = ("role", "require")
    refused = {about for about, check in seen if check.what in asked and check.verdict is not Verdict.OK}
    if usable := sorted(probed - refused):
        yield Check(what="backend", verdict=Verdict.OK, found=f"it may take {', '.join(usable)}")
    else:
        found = "no installed backend can run here and do what the configuration asks"
        yield _failed("backend", found, "the lines of each backend say why", "backend.none")


def _diagnosed(kind: type[Backend], options: Any) -> tuple[list[Check], list[Check]]:
    """The backend's own checks of this machine, and its defects."""
    if not issubclass(kind, Diagnosing):
        return [], []
    try:
        return list(kind.diagnose(options)), []
    except (Exception, SystemExit) as error:  # it must not raise, either
        return [], [_failed("diagnosis", f"it raised {type(error).__name__}: {error}", _author(kind))]


def _author(kind: type[Backend]) -> str:
    return f"tell the author of the package; `statelink conform {kind.name} -k Declaration` tests it"


def _stalled(kind: type[Backend]) -> str:
    """How stalled peers delay other peers, as the backend declares it. Nobody measures it here."""
    most = kind.capabilities.most_stalled
    if most is None:
        return "declared: any number of them delays nobody else"
    if most:
        said = f"up to {most} at once delay nobody else; beyond that, others wait until the library gives one up"
        return f"declared: {said}"
    return "declared: one may delay all others until the library gives it up"


def _failed(what: str, found: str, hint: str, code: str = "") -> Check:
    return Check(what=what, verdict=Verdict.PROBLEM, found=found, hint=hint, code=code)


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
