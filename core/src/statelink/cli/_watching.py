"""Shows something again and again, until it is interrupted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.live import Live

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["count_option", "every_option", "watch"]

every_option = click.option(
    "--every", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Wait this many seconds in between."
)
count_option = click.option(
    "--count", type=click.IntRange(min=1), default=None, help="Stop after this many times instead of at an interrupt."
)


def watch(
    look: Callable[[], Any],
    render: Callable[[Any], RenderableType] | None,
    every: float,
    count: int | None,
) -> None:
    """Look, and show what was seen, every few seconds. An interrupt ends it, and is no error.

    Args:
        look: Returns what is seen at this moment.
        render: Turns that into something for the terminal. ``None``: print it as one line of JSON.
        every: Seconds between two looks.
        count: Number of looks; without end if ``None``.
    """
    console = Console()
    numbers = itertools.count(1) if count is None else range(1, count + 1)
    try:
        if render is None or not console.is_terminal:
            for number in numbers:
                _print(console, look(), render)
                _rest(every, number, count)
            return
        shown: RenderableType = ""
        with Live(console=console, screen=True, auto_refresh=False) as live:
            try:
                for number in numbers:
                    shown = render(look())
                    live.update(shown, refresh=True)
                    _rest(every, number, count)
            except KeyboardInterrupt:
                pass
        console.print(shown)  # the last one stays on the terminal
    except KeyboardInterrupt:
        pass


def _print(console: Console, seen: Any, render: Callable[[Any], RenderableType] | None) -> None:
    if render is None:
        click.echo(msgspec.json.encode(seen).decode())
    else:
        console.print(render(seen))


def _rest(every: float, number: int, count: int | None) -> None:
    if number != count:
        time.sleep(every)
