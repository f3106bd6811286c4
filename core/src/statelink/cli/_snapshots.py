"""Asks running links of this user for their snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click

from statelink.link import ask, sockets

__all__ = ["Answer", "Answers", "answers", "named"]


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
