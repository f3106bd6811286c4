"""``statelink inspect``: shows what the links of running processes are doing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statelink.link import ask, sockets

__all__ = ["inspect"]

REMEMBERED = frozenset({"tombstones", "gone", "seen", "unmet"})
"""Keys of the load that count records of earlier rooms, which wait for nothing."""


@click.command()
@click.argument("which", metavar="[PID|PATH]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of snapshots instead of tables.")
def inspect(which: str | None, as_json: bool) -> None:
    """Show peers, rooms and held memory of this user's links, or of one process or socket."""
    paths = _paths(which)
    snapshots = []
    for path in paths:
        try:
            snapshots.append((path, ask(path)))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            click.echo(f"{path} does not answer: {why}", err=True)
    if as_json:
        click.echo(json.dumps([seen for _, seen in snapshots], indent=2))
    else:
        console = Console()
        if not paths:
            console.print("no link of this user is open on this machine")
        for path, seen in snapshots:
            _show(console, path, seen)
    if len(snapshots) < len(paths):
        raise SystemExit(1)


def _paths(which: str | None) -> list[Path]:
    if which is None:
        return sockets()
    if not which.isdigit():
        return [Path(which)]
    found = [path for path in sockets() if path.name.partition("-")[0] == which]
    if not found:
        raise click.ClickException(f"process {which} has no open link of this user")
    return found


def _show(console: Console, path: Path, seen: dict[str, Any]) -> None:
    counts = ", ".join(f"{count} {status}" for status, count in seen["rooms"].items() if count) or "none"
    lines = (
        f"{seen['link']}: {seen['role']} rank {seen['rank']} of {seen['instance']}",
        f"{seen['address']} over {seen['backend']}, process {path.name.partition('-')[0]}",
        f"rooms: {counts}",
        f"held: {_amounts(seen['held_bytes'])}",
        f"quarantined: {_amounts(seen['quarantined_bytes'])}",
        "waiting: " + ", ".join(f"{name} {depth}" for name, depth in seen["load"].items() if name not in REMEMBERED),
    )
    for line in lines:
        console.print(Text(line))
    _table(console, "peers", seen["ranks"], ("peer", "role", "rank", "instance", "state", "age", "heard", "transport"))
    _table(console, "oldest rooms", seen["oldest"], ("room", "role", "status", "age", "holds", "waits_for", "reason"))
    console.print()


def _amounts(by: dict[str, int]) -> str:
    inner = ", ".join(f"{name} {nbytes}" for name, nbytes in by.items())
    return f"{sum(by.values())} bytes" + (f" ({inner})" if inner else "")


def _table(console: Console, title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=None)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if row[column] is None else str(row[column])) for column in columns))
    console.print(table)
