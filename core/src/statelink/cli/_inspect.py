"""``statelink inspect``: shows what the links of running processes are doing."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ._output import json_option, print_json
from ._snapshots import Answer, Answers, answers, count_option, every_option, named, watch
from ._words import counted, duration, size

__all__ = ["inspect"]

NOT_QUEUED = frozenset({"tombstones", "gone", "seen", "unmet", "taken_back", "changes_dropped"})
"""Keys of the load that count records of earlier rooms, which wait for nothing."""

NARROWEST = 6
"""Least width of a column of which the text may take several lines: that of a peer's short name."""

PYTHON_SWITCH_INTERVAL = 0.005
"""Seconds. Any other interval is shown."""


@click.command()
@click.argument("which", metavar="[PID|PATH]", required=False)
@json_option
@click.option("--watch", "watching", is_flag=True, help="Look again and again, until an interrupt.")
@every_option
@count_option
def inspect(which: str | None, as_json: bool, watching: bool, every: float, count: int | None) -> None:
    """Show what running links do.

    Shows peers, rooms, held memory and queues of this user's links, or of one process or socket. With --json, prints an
    array of snapshots; with --watch, too, one on each line. Exits with 1 if a link does not answer; with --count,
    if one does not answer the last time.
    """
    if watching or count is not None:
        last = watch(lambda: answers(which), _render, every, count, _plain if as_json else None)
        if last is not None and last.silent:
            raise SystemExit(1)
        return
    found = answers(which)
    for line in found.silent:
        click.echo(line, err=True)
    if as_json:
        print_json(_plain(found))
    elif found.given or not found.silent:
        Console().print(_render(found._replace(silent=[])))
    if found.silent:
        raise SystemExit(1)


def _plain(found: Answers) -> list[dict[str, Any]]:
    return [each.seen for each in found.given]


def _render(found: Answers) -> RenderableType:
    parts: list[RenderableType] = [Text(line) for line in found.silent]
    if not found.given and not found.silent:
        parts.append(Text("no link of this user is open on this machine"))
    for answer in found.given:
        parts += _link(answer)
    return Group(*parts)


def _link(answer: Answer) -> list[RenderableType]:
    seen = answer.seen
    rooms = ", ".join(f"{count} {status}" for status, count in seen["rooms"].items() if count) or "none"
    load = {name: depth for name, depth in seen["load"].items() if depth and name not in NOT_QUEUED}
    facts = {
        "link": seen["link"],
        "address": seen["address"],
        "rooms": rooms,
        "held": _amounts(seen["held_bytes"]),
        "quarantined": _amounts(seen["quarantined_bytes"]),
        "queues": ", ".join(f"{name.replace('_', ' ')} {depth}" for name, depth in load.items()) or "empty",
    }
    interval = seen.get("switch_interval", PYTHON_SWITCH_INTERVAL)  # a process of an older release does not say it
    if interval != PYTHON_SWITCH_INTERVAL:
        facts["switch interval"] = f"{interval * 1e3:g} ms"
    if seen["refused_keys"]:
        facts["refused keys"] = counted(seen["refused_keys"], "connection")
    if seen["dropped_frames"]:
        facts["dropped frames"] = ", ".join(f"{code} {count}" for code, count in seen["dropped_frames"].items())
    about = Table(box=None, pad_edge=False, show_header=False)
    about.add_column(no_wrap=True, style="dim")
    about.add_column(overflow="fold")
    for name, value in facts.items():
        about.add_row(Text(name), Text(value))
    head = f"{seen['role']} rank {seen['rank']} of {seen['instance']}, process {answer.pid}, over {seen['backend']}"
    if seen["suspended"]:
        head += ", suspended"
    parts: list[RenderableType] = [Text(head, style="bold"), Padding(about, (0, 0, 0, 2))]
    if seen["ranks"]:
        parts.append(Padding(_ranks(seen["ranks"]), (0, 0, 0, 2)))
    if seen["oldest"]:
        parts.append(Padding(_rooms(seen["oldest"]), (0, 0, 0, 2)))
    return [*parts, Text("")]


def _ranks(ranks: list[dict[str, Any]]) -> Table:
    table = _table("peer", "role", "rank", "instance", "state", "age", "heard", "transport", wide=("peer", "instance"))
    for each in ranks:
        rank = "-" if each["rank"] is None else str(each["rank"])
        unknown = each["instance"] in (None, each["peer"]) or each["instance"].startswith("tcp://")
        instance = "-" if unknown else each["instance"]  # an unmet instance has only addresses
        transport = each["transport"] or "-"
        heard = "never" if each["heard"] is None else duration(each["heard"])
        cells = (named(each["peer"]), each["role"], rank, instance, each["state"], duration(each["age"]), heard)
        table.add_row(*map(Text, (*cells, transport)))
    return table


def _rooms(rooms: list[dict[str, Any]]) -> Table:
    table = _table("room", "role", "status", "age", "memory", "waits for", wide=("waits for",))
    for each in rooms:
        waits = f"{each['waits_for']} ({each['reason']})" if each["reason"] else each["waits_for"]
        memory = "held" if each["holds"] else "-"
        cells = (str(each["room"]), each["role"], each["status"], duration(each["age"]), memory, waits)
        table.add_row(*map(Text, cells))
    return table


def _table(*columns: str, wide: tuple[str, ...]) -> Table:
    """A table of which some columns share the width that the others leave, with room for a short name each."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        if column in wide:
            table.add_column(column, min_width=max(len(column), NARROWEST), overflow="fold")
        else:
            table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _amounts(by: dict[str, int]) -> str:
    if not any(by.values()):
        return "nothing"
    inner = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in by.items())
    return f"{size(sum(by.values()))} ({inner})"
