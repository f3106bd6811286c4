"""The fields that every message about a room begins with."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["Use"]


class Use(TypedDict):
    """One use of a room between two links."""

    sender: str
    to: str
    room: int
    generation: int
