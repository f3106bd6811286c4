"""The command: what it prints of each look."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._output import json_option
from .._snapshots import answers
from .._watching import count_option, every_option, watch
from .._words import counted, size
from ._looks import ROLES, Looks

__all__ = ["top"]


@click.command()
@click.argument("which", metavar="[PID|PATH]", required=False)
@every_option
@count_option
@json_option
def top(which: str | None, every: float, count: int | None, as_json: bool) -> None:
    """Show what running links move.

    Shows live rooms, ready peers, bytes and ended rooms a second, held memory and queues of this user's links, or of
    one process or socket, until an interrupt. Bytes count when their room ends. With --json, prints one line for each
    look. What is counted a second is unknown at the first look. With --count, exits with 1 if a link does not answer
    the last time.
    """
    looks = Looks()
    last = watch(lambda: looks.add(answers(which), time.monotonic()), _render, every, count, dict if as_json else None)
    if last is not None and last["silent"]:
        raise SystemExit(1)


def _render(look: dict[str, Any]) -> RenderableType:
    links = sorted(look["links"], key=lambda link: (-_moved(link), link["instance"], link["rank"]))
    head = (
        f"{counted(len(links), 'link')}, {counted(sum(link['rooms'] for link in links), 'live room')}, "
        f"{size(sum(map(_moved, links)))}/s, {size(sum(link['held_bytes'] for link in links))} held, "
        f"{size(sum(link['quarantined_bytes'] for link in links))} quarantined"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("pid", no_wrap=True)
    table.add_column("link", min_width=18, overflow="fold")
    for column in ("peers", "rooms", "ended/s", "failed/s", "bytes/s", "held", "queued"):
        table.add_column(column, justify="right", no_wrap=True)
    for link in links:
        rates = link["a_second"]
        held = link["held_bytes"] + link["quarantined_bytes"]
        moved = "-" if rates["sent"] is None else size(_moved(link))
        cells = (
            str(link["pid"] or "-"),
            f"{link['instance']}/{link['rank']} {link['role']}",
            f"{link['ready']}/{link['peers']}",
            str(link["rooms"]),
            *("-" if rates[name] is None else f"{rates[name]:.1f}" for name in ("succeeded", "failed")),
            moved,
            size(held),
            str(sum(link["queued"].values())),
        )
        table.add_row(*map(Text, cells), style="red" if link["quarantined_bytes"] or rates["failed"] else "")
    lines = [Text(line) for line in look["silent"]]
    return Group(Text(head, style="bold"), *lines, table)


def _moved(link: dict[str, Any]) -> float:
    return sum(link["a_second"][verb] or 0.0 for verb in ROLES.values())
