"""Checks whole numbers from engines. They may be Python's or numpy's, but neither floats nor bools."""

from __future__ import annotations

from typing import Any

from statelink._arguments import whole
from statelink.errors import RoomError

__all__ = ["checked_int"]


def checked_int(value: Any, what: str, low: int, high: int, *, code: str = "room.number") -> int:
    """``value`` as a Python integer in ``[low, high]``.

    Raises:
        RoomError: It is no whole number, or out of bounds. The error says ``what`` it was meant to be.
    """
    return whole(value, what, low, high, error=RoomError, code=code)
