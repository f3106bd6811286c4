"""Makes objects that have to be closed, so that an interrupt at any moment finds them closed or held."""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import contextlib

__all__ = ["held", "into"]

Made = TypeVar("Made")


def into(made: list[Made], make: Callable[[], Made]) -> None:
    """Make an object, and append it to a list, in one step of the interpreter.

    An interrupt (KeyboardInterrupt) may come after any call. If it came after the object's own, nobody would have the
    object, and nobody could close it.

    Args:
        made: The list.
        make: A `partial` of the object's class. A function would take steps of its own.
    """
    made.extend(starmap(make, [()]))


def held(opened: contextlib.ExitStack, make: Callable[[], Made], close: Callable[[Made], object]) -> Made:
    """Make an object that ``opened`` closes. ``make`` is as for `into`."""
    made: list[Made] = []
    opened.callback(lambda: [close(each) for each in made])
    into(made, make)
    return made[0]
