"""Checks for clauses that say in words what was found."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ._worker import WORDLESS, Finding

if TYPE_CHECKING:
    from statelink.backend import Outcome

    from ._memory import Array

__all__ = ["BYTES", "all_moved", "given_reason", "refused", "same"]

BYTES = "Write each byte of each block to its place, and no other, before the transfer succeeds; change no source."
FAILS = "This batch can be moved: let its transfer succeed, or mend what the reason says."


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
    if failed:
        given_reason(failed[0].reason, "a move failed")
        raise Finding(f"a move failed: {failed[0].reason}", FAILS, general=True)


def given_reason(reason: str, what: str) -> None:
    """Check that a failure has a reason. ``what`` says what failed.

    Raises:
        AssertionError: It has none.
    """
    if not reason:
        raise Finding(f"{what} without a reason", WORDLESS, general=True)


def same(found: Array, expected: Array, what: str) -> None:
    """Check that memory holds the expected bytes.

    Raises:
        AssertionError: It does not. ``what`` says whose memory it is.
    """
    wrong = np.flatnonzero(found != expected)  # copied once, because a backend may still write
    if len(wrong):
        words = f"{len(wrong)} bytes of {what} are not what they should be, the first at {wrong[0]}"
        raise Finding(words, BYTES, general=True)
