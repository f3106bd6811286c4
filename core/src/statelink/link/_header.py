"""The fields that every message about a room begins with."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["RoomHeader", "RoomKey"]

RoomKey = tuple[int, int]
"""A room id and an attempt: with these two numbers, the engines of both sides name one use of the id."""


class RoomHeader(TypedDict):
    """One use of a room id between two links."""

    sender: str
    to: str
    room: int
    generation: int
