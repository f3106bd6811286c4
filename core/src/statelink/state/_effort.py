"""Budgets for checks of what a peer sent, if they can cost more than the size of the message suggests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from statelink.errors import StateError

__all__ = ["SpentError", "bounded", "known", "spend"]


class SpentError(StateError):
    """The check of a description costs more than its budget."""


class _Budget(threading.local):
    left: int | None = None
    known: set[bytes]


_budget = _Budget()


@contextlib.contextmanager
def bounded(units: int) -> Iterator[None]:
    """Let checks on this thread spend at most so many units; see `spend`. Must not be nested."""
    _budget.left, _budget.known = units, set()
    try:
        yield
    finally:
        _budget.left, _budget.known = None, set()


def known(key: Callable[[], bytes]) -> bool:
    """Whether something with this key was checked before, since `bounded` began. From now on it counts as checked."""
    if _budget.left is None:
        return False
    made = key()
    if made in _budget.known:
        return True
    _budget.known.add(made)
    return False


def spend(units: int) -> None:
    """Spend units for a check that follows. Outside `bounded`, every check is free.

    Raises:
        SpentError: The budget is spent.
    """
    if _budget.left is None:
        return
    _budget.left -= units
    if _budget.left < 0:
        raise SpentError(
            "a description takes too long to check", cause="it has too many different layouts, slabs or pieces of items"
        )
