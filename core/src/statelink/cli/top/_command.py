"""``statelink top``: what running links move, from one look to the next."""

from __future__ import annotations

import time
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ._inspect import REMEMBERED
from ._output import json_option
from ._snapshots import Answers, answers
from ._watching import count_option, every_option, watch
from ._words import size

__all__ = ["Looks", "top"]

ENDED: Final = frozenset({"succeeded", "failed"})
ROLES: Final = {"prefill": "sent", "decode": "received"}
"""Role of a link in a room, and what it does with the bytes."""


@click.command()
@click.argument("which", metavar="[PID|PATH]", required=False)
@every_option
@count_option
@json_option
def top(which: str | None, every: float, count: int | None, as_json: bool) -> None:
    """Show what running links move.

    Shows live rooms, ready peers, bytes and ended rooms a second, held memory and queues of this user's links, or of
    one process or socket, until an interrupt. Bytes count when their room ends. With --json, prints one line for each
    look. What is counted a second is unknown at the first look.
    """
    looks = Looks()
    watch(lambda: looks.add(answers(which), time.monotonic()), None if as_json else _render, every, count)


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
    states = [rank["state"] for rank in seen["ranks"]]
    return {
        "link": seen["link"],
        "instance": seen["instance"],
        "rank": seen["rank"],
        "role": seen["role"],
        "backend": seen["backend"],
        "peers": len(states),
        "ready": states.count("ready"),
        "rooms": sum(count for status, count in seen["rooms"].items() if status not in ENDED),
        "held_bytes": sum(seen["held_bytes"].values()),
        "quarantined_bytes": sum(seen["quarantined_bytes"].values()),
        "queued": {
            name: depth
            for name, depth in seen["load"].items()
            if depth and name not in REMEMBERED and not name.endswith("_bytes")
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


def _render(look: dict[str, Any]) -> RenderableType:
    links = sorted(look["links"], key=lambda link: (-_moved(link), link["instance"], link["rank"]))
    head = (
        f"{len(links)} links, {sum(link['rooms'] for link in links)} live rooms, "
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
