"""Asks running links of this user for their snapshots, once or again and again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
import msgspec
from rich.console import Console
from rich.live import Live

from statelink.link import ask, sockets

from ._values import seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Answer", "Answers", "answers", "count_option", "every_option", "named", "watch"]

MOST_ADDRESS_CHARACTERS = 15
"""Most characters of an unmet peer's address that are shown: so many fit into a line of 80 columns."""


class Answer(NamedTuple):
    """What one link answered.

    Attributes:
        path: Its socket.
        pid: Its process.
        seen: The snapshot.
    """

    path: Path
    pid: str
    seen: dict[str, Any]


class Answers(NamedTuple):
    """What the links answered.

    Attributes:
        given: One for each link that answered.
        silent: A line about each link that did not.
    """

    given: list[Answer]
    silent: list[str]


def answers(which: str | None) -> Answers:
    """Ask every link of this user on this machine, or those of one process, or the one at a socket.

    A link that is closed while every link is asked is left out.

    Args:
        which: A process id, or the path of a socket.

    Raises:
        click.ClickException: The process has no open link.
    """
    given, silent = [], []
    for path in _paths(which):
        try:
            given.append(Answer(path, path.name.partition("-")[0], ask(path)))
        except (OSError, ValueError) as error:
            if which is None and isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
                continue  # it was closed since its socket was found
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            silent.append(f"{path} does not answer: {why}")
    return Answers(given, silent)


def named(peer: str) -> str:
    """The end of a peer's link name, which tells incarnations of one rank apart, or of the address of an unmet peer."""
    if peer.startswith("tcp://"):
        place = peer.removeprefix("tcp://").partition("@")[0]
        return place if len(place) <= MOST_ADDRESS_CHARACTERS else f"...{place[3 - MOST_ADDRESS_CHARACTERS :]}"
    incarnation = peer.rpartition("-")[2]
    return incarnation[-6:] if len(incarnation) == 16 else peer


def _paths(which: str | None) -> list[Path]:
    if which is None:
        return sockets()
    if not which.isdigit():
        return [Path(which)]
    found = [path for path in sockets() if path.name.partition("-")[0] == which]
    if not found:
        raise click.ClickException(f"process {which} has no open link of this user")
    return found


Seen = TypeVar("Seen")

every_option = click.option(
    "--every", type=seconds(0.1), default=2.0, show_default=True, help="Wait this many seconds in between."
)
count_option = click.option(
    "--count", type=click.IntRange(min=1), default=None, help="Stop after this many times instead of at an interrupt."
)


def watch(
    look: Callable[[], Seen],
    render: Callable[[Seen], RenderableType],
    every: float,
    count: int | None,
    plain: Callable[[Seen], Any] | None = None,
) -> Seen | None:
    """Look, and show what was seen, every few seconds. An interrupt ends it, and is no error.

    Args:
        look: Returns what is seen at this moment.
        render: Turns that into something for the terminal.
        every: Seconds between two looks.
        count: Number of looks; without end if ``None``.
        plain: Turns what is seen into plain types, to print it as one line of JSON instead.

    Returns:
        What was seen last. ``None`` if an interrupt ended it.
    """
    console = Console()
    numbers = itertools.count(1) if count is None else range(1, count + 1)
    seen: Seen | None = None
    try:
        if plain is not None or not console.is_terminal:
            for number in numbers:
                seen = look()
                if plain is not None:
                    click.echo(msgspec.json.encode(plain(seen)).decode())
                else:
                    console.print(render(seen))
                _rest(every, number, count)
            return seen
        shown: RenderableType = ""
        with Live(console=console, screen=True, auto_refresh=False) as live:
            try:
                for number in numbers:
                    seen = look()
                    shown = render(seen)
                    live.update(shown, refresh=True)
                    _rest(every, number, count)
            except KeyboardInterrupt:
                seen = None
        console.print(shown)  # the last one stays on the terminal
    except KeyboardInterrupt:
        return None
    return seen


def _rest(every: float, number: int, count: int | None) -> None:
    if number != count:
        time.sleep(every)
