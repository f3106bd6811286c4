"""Tells links that their process was forked from the one that opened them, without asking the system in each call."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forkable", "note_forks"]


class Forkable(Protocol):
    """An object that has to know whether its process was forked.

    Attributes:
        forked: Set to true in a forked child.
    """

    forked: bool


_noted: weakref.WeakSet[Forkable] = weakref.WeakSet()


def note_forks(each: Forkable) -> None:
    """Set ``forked`` of an object in every child that is forked from this process. Any thread; never blocks."""
    _noted.add(each)


def _tell_child() -> None:
    # The child has only the thread that forked, so that nothing else uses the set.
    for each in _noted:
        each.forked = True


os.register_at_fork(after_in_child=_tell_child)
