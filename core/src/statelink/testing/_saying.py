"""Checks for clauses that say in words what was found."""

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
    """Check that the call inside is refused with one of these errors. ``what`` names the call.

    Raises:
        AssertionError: It was not refused, or ``match`` does not match the error's text.
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
    """Check that every transfer succeeded.

    Raises:
        AssertionError: A transfer failed.
    """
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert not failed, f"a move failed: {failed[0].reason}" if failed else ""


def same(found: Array, expected: Array, what: str) -> None:
    """Check that memory holds the expected bytes.

    Raises:
        AssertionError: It does not. ``what`` says whose memory it is.
    """
    wrong = np.flatnonzero(found != expected)  # copied once, because a backend may still write
    if len(wrong):
        raise AssertionError(f"{len(wrong)} bytes of {what} are not what they should be, the first at {wrong[0]}")
