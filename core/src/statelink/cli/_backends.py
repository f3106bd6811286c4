"""``statelink backends``: lists the installed backends and their state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statelink.backend import ANY, Backend
from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.registry import Listed, conflict_hint, hidden_backends, list_backends, load_backend, probed

from ._alone import Alone, Ended
from ._output import json_option, print_json

__all__ = ["backends"]


@click.command()
@json_option
@click.option("--probe/--no-probe", default=True, help="Import each backend, and ask whether it can run here.")
def backends(as_json: bool, probe: bool) -> None:
    """List the installed backends.

    Shows the package, version and capabilities of each, and whether it can run here. A broken backend is listed with
    the reason, and does not stop the command.
    """
    listed = list_backends()
    alike = {each.name: [other for other in listed if other.name == each.name] for each in listed}
    rows = [_row(each, conflict_hint(alike[each.name]) if len(alike[each.name]) > 1 else "") for each in listed]
    if probe:
        _probe([row for row in rows if row["state"] == "listed"])
    if as_json:
        print_json(rows)
        return
    _print(rows)
    hidden = hidden_backends()
    if hidden:
        click.echo(f"\n{len(hidden)} hidden by STATELINK_PLUGINS: {', '.join(hidden)}")


def _print(rows: list[dict[str, Any]]) -> None:
    console = Console()
    if not rows:
        console.print("no backends are installed")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "package", "state", "memory", "state types"):
        table.add_column(title)
    for row in rows:
        declared = row["capabilities"] or {}
        cells = (
            row["name"],
            f"{row['distribution']} {row['version']}",
            row["state"],
            *(", ".join(declared.get(field, ())) for field in ("memory_kinds", "state_types")),
        )
        # As text, not markup, because names and reasons may contain brackets.
        table.add_row(*map(Text, cells))
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(Text(f"\n{row['name']}: {row['reason']}"))
        if row["hint"]:
            console.print(Text(f"  hint: {row['hint']}"))


def _row(listed: Listed, conflict: str) -> dict[str, Any]:
    return {
        "name": listed.name,
        "distribution": listed.distribution,
        "version": listed.version,
        "entry_point": listed.value,
        "state": "conflict" if conflict else "listed",
        "reason": "several packages bring this name" if conflict else "",
        "hint": conflict,
        "capabilities": None,
        "details": {},
    }


def _probe(rows: list[dict[str, Any]]) -> None:
    """Complete the rows. Each backend is imported in a process of its own, which its library may end; all at once."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Alone(partial(_states, row["name"]))) for row in rows]
        for row, child in zip(rows, children, strict=True):
            try:
                for state in child.values():
                    row.update(state)
            except Ended as ended:
                row.update(state="broken", reason=f"importing or probing it {ended.found}", hint=ended.hint)


def _states(name: str) -> Iterator[dict[str, Any]]:
    """The state of one backend, as a part of its row."""
    try:
        yield _probed(load_backend(name))
    except StatelinkError as error:
        yield {"state": "broken", "reason": str(error.reason).partition("\nhint:")[0], "hint": error.hint}
    except (Exception, SystemExit) as error:  # a class of a plugin may raise anything
        yield {"state": "broken", "reason": f"it raised {type(error).__name__}: {error}"}


def _probed(backend: type[Backend]) -> dict[str, Any]:
    found = probed(backend, read_options(backend.Options, {}, f"options of backend {backend.name!r}"))
    declared = backend.capabilities
    return {
        "state": "ready" if found.ok else "unavailable",
        "reason": found.reason,
        "hint": found.hint,
        "details": dict(found.details),
        "capabilities": {
            "memory_kinds": sorted(declared.memory_kinds),
            "state_types": ["any"] if declared.state_types == ANY else sorted(declared.state_types),
            "submit_mode": declared.submit_mode.value,
            "source": declared.source.value,
            "target": declared.target.value,
            "thread_safe": declared.thread_safe,
            "stalled_peers": declared.most_stalled,
            "max_blocks": declared.max_blocks,
            "max_bytes": declared.max_bytes,
            "links_per_process": declared.links_per_process,
            "both_roles": declared.both_roles,
        },
    }
