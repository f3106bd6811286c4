"""Checks of the clauses that say in words what was found."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from statelink.backend import Outcome

    from ._memory import Array

__all__ = ["all_moved", "refused", "same"]


@contextlib.contextmanager
def refused(what: str, *errors: type[Exception], match: str = "") -> Iterator[None]:
    """What is called inside is refused with one of these errors; ``what`` is said of it if it is not.

    Raises:
        AssertionError: It was not, or the error's message has nothing that ``match`` finds.
    """
    try:
        yield
    except errors as error:
        if not re.search(match, str(error)):
            raise AssertionError(f"{what} was refused, and the reason does not say {match!r}: {error}") from error
        return
    names = " or ".join(each.__name__ for each in errors)
    raise AssertionError(f"{what} was not refused: {names} was expected")


def all_moved(outcomes: Sequence[Outcome]) -> None:
    """Every transfer went well.

    Raises:
        AssertionError: One did not.
    """
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert not failed, f"a move failed: {failed[0].reason}" if failed else ""


def same(found: Array, expected: Array, what: str) -> None:
    """Memory holds what it should.

    Raises:
        AssertionError: It does not; ``what`` says whose memory it is.
    """
    wrong = np.flatnonzero(found != expected)  # once: a backend may go on writing meanwhile
    if len(wrong):
        raise AssertionError(f"{len(wrong)} bytes of {what} are not what they should be, the first at {wrong[0]}")
