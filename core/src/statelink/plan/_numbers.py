"""Checks whole numbers from engines. They may be Python's or numpy's, but neither floats nor bools."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from statelink.errors import RoomError

__all__ = ["checked_int"]


def checked_int(value: Any, what: str, low: int, high: int, *, code: str = "room.number") -> int:
    """``value`` as a Python integer in ``[low, high]``.

    Raises:
        RoomError: It is no whole number, or out of bounds. The error says ``what`` it was meant to be.
    """
    if type(value) is int and low <= value <= high:
        return value
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        cause = f"a whole number from {low} to {high} is expected"
        raise RoomError(f"{what} is {value!r:.80}", cause=cause, code=code)
    return number
