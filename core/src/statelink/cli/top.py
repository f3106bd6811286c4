"""``statelink top``: what running links move, from one look to the next."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click
from rich.table import Table
from rich.text import Text

from ._inspect import NOT_QUEUED
from ._output import json_option
from ._snapshots import Answers, answers, count_option, every_option, watch
from ._words import counted, size

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


__all__ = ["Answers", "Looks", "answers", "top"]

COLUMNS: Final = ("pid", "link", "peers", "rooms", "ended/s", "failed/s", "bytes/s", "held", "queued")
DISPENSABLE: Final = ("queued", "held", "failed/s", "ended/s", "rooms", "peers", "bytes/s")
"""Columns that are left out on a narrow terminal, the first one first. What is left says which link it is."""
LINK: Final = 18
"""Least width of the column of links, of which the text may take several lines."""


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
    last = watch(lambda: looks.add(answers(which), time.monotonic()), _Shown, every, count, dict if as_json else None)
    if last is not None and last["silent"]:
        raise SystemExit(1)


class _Shown:
    """A look as a head and a table, which leaves out columns where the terminal is narrow."""

    def __init__(self, look: dict[str, Any]) -> None:
        links = sorted(look["links"], key=lambda link: (-_moved(link), link["instance"], link["rank"]))
        self._head = (
            f"{counted(len(links), 'link')}, {counted(sum(link['rooms'] for link in links), 'live room')}, "
            f"{size(sum(map(_moved, links)))}/s, {size(sum(link['held_bytes'] for link in links))} held, "
            f"{size(sum(link['quarantined_bytes'] for link in links))} quarantined"
        )
        self._silent = look["silent"]
        self._rows = [(_cells(link), _style(link)) for link in links]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines, in the width that there is."""
        shown = set(COLUMNS)
        for name in DISPENSABLE:
            if self._width(shown) <= options.max_width:
                break
            shown.discard(name)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        names = [name for name in COLUMNS if name in shown]
        for name in names:
            if name == "link":
                table.add_column(name, min_width=LINK, overflow="fold")
            else:
                table.add_column(name, justify="left" if name == "pid" else "right", no_wrap=True)
        for cells, style in self._rows:
            table.add_row(*(Text(cells[name]) for name in names), style=style)
        yield Text(self._head, style="bold")
        yield from map(Text, self._silent)
        yield table

    def _width(self, shown: set[str]) -> int:
        """The least width of a table with these columns, between which there is a blank."""
        widths = [
            LINK if name == "link" else max([len(name), *(len(cells[name]) for cells, _ in self._rows)])
            for name in shown
        ]
        return sum(widths) + len(widths)


def _cells(link: dict[str, Any]) -> dict[str, str]:
    """Column to what it says of a link."""
    rates = link["a_second"]
    ended, failed = ("-" if rates[name] is None else f"{rates[name]:.1f}" for name in ("succeeded", "failed"))
    return {
        "pid": str(link["pid"] or "-"),
        "link": f"{link['instance']}/{link['rank']} {link['role']}",
        "peers": f"{link['ready']}/{link['peers']}",
        "rooms": str(link["rooms"]),
        "ended/s": ended,
        "failed/s": failed,
        "bytes/s": "-" if rates["sent"] is None else size(_moved(link)),
        "held": size(link["held_bytes"] + link["quarantined_bytes"]),
        "queued": str(sum(link["queued"].values())),
    }


def _style(link: dict[str, Any]) -> str:
    return "red" if link["quarantined_bytes"] or link["a_second"]["failed"] else ""


def _moved(link: dict[str, Any]) -> float:
    return sum(link["a_second"][verb] or 0.0 for verb in ROLES.values())


ENDED: Final = frozenset({"succeeded", "failed"})
ROLES: Final = {"prefill": "sent", "decode": "received"}
"""Role of a link in a room, and what it does with the bytes."""
READY: Final = frozenset({"ready", "attached"})
"""States of a peer with which rooms can move: `ready` as decode sees prefill, `attached` as prefill sees decode."""
UNCOUNTED: Final = NOT_QUEUED | {"changes"}
"""An engine may look at each of its rooms instead, and never take the changes."""


class Looks:
    """Turns the counters of successive snapshots into rates."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, dict[str, int]]] = {}

    def add(self, found: Answers, now: float) -> dict[str, Any]:
        """One look.

        Args:
            found: What the links answered.
            now: When, in seconds.

        Returns:
            ``links``: for each link what it is and has, and its rates ``a_second``, which are ``None`` at its first
            look; and ``silent``, a line for each link that did not answer.
        """
        before, self._before, links = self._before, {}, []
        for answer in found.given:
            seen = answer.seen
            counted = _counted(seen["totals"])
            self._before[seen["link"]] = now, counted
            then, earlier = before.get(seen["link"], (now, counted))
            passed = now - then
            rates = {name: (number - earlier[name]) / passed if passed else None for name, number in counted.items()}
            links.append({"pid": int(answer.pid) if answer.pid.isdigit() else None, **_plain(seen), "a_second": rates})
        return {"links": links, "silent": found.silent}


def _plain(seen: dict[str, Any]) -> dict[str, Any]:
    states: dict[str, list[str]] = {}  # a peer of a link of the role `both` may have a state in each of its roles
    for rank in seen["ranks"]:
        states.setdefault(rank["peer"], []).append(rank["state"])
    return {
        "link": seen["link"],
        "instance": seen["instance"],
        "rank": seen["rank"],
        "role": seen["role"],
        "backend": seen["backend"],
        "peers": len(states),
        "ready": sum(READY.issuperset(each) for each in states.values()),
        "rooms": sum(count for status, count in seen["rooms"].items() if status not in ENDED),
        "held_bytes": sum(seen["held_bytes"].values()),
        "quarantined_bytes": sum(seen["quarantined_bytes"].values()),
        "queued": {
            name: depth
            for name, depth in seen["load"].items()
            if depth and name not in UNCOUNTED and not name.endswith("_bytes")
        },
    }


def _counted(totals: dict[str, Any]) -> dict[str, int]:
    """The counters of which rates are shown."""
    counted = {
        verb: sum(sum(by.values()) for by in totals["bytes"].get(role, {}).values()) for role, verb in ROLES.items()
    }
    outcomes = [(name, count) for by in totals["rooms"].values() for name, count in by.items()]
    counted["succeeded"] = sum(count for name, count in outcomes if name == "succeeded")
    counted["failed"] = sum(count for name, count in outcomes if name != "succeeded")
    return counted
