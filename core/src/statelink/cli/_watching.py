"""Shows something again and again, until it is interrupted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.live import Live

from ._numbers import seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["count_option", "every_option", "watch"]

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
