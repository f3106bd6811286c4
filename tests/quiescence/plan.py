"""What happens to each room: drawn from a seed, the same on both sides."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.quiescence.pattern import key_of

__all__ = ["IDS", "WINDOW", "Plan", "plan"]

WINDOW = 12
"""Rooms under way at once."""
IDS = 8 * WINDOW
"""Room ids; each is used again and again."""
TRIGGERS = {
    "prefill": ("unmet", "unsent", "chunk", "chunk", "gap", "written", "ending"),
    "decode": ("unmet", "unsent", "chunk", "chunk", "gap", "late"),
}


class Plan(NamedTuple):
    """One room.

    Attributes:
        number: Which one, from 0.
        room: Its id.
        ends: Pages that were pushed after each chunk.
        aborter: Who aborts it; empty if nobody does.
        trigger: When; see `TRIGGERS`.
        delay: Seconds after the trigger, or a fraction where the trigger takes one.
        gap: Seconds between chunks.
        broken: Whether a batch of it is to fail in the library.
        key: What its bytes are told by; another one for every use of an id.
    """

    number: int
    room: int
    ends: tuple[int, ...]
    aborter: str
    trigger: str
    delay: float
    gap: float
    broken: bool
    key: int

    @property
    def pages(self) -> int:
        return self.ends[-1]

    def share(self, page: int) -> int:
        """Key of one of its pages, or with -1 of its row."""
        return key_of(self.key, page + 1)


def plan(seed: int, number: int, aborts: float, breaks: float) -> Plan:
    """The plan of a room.

    Args:
        seed: Of the run.
        number: Of the room.
        aborts: How likely it is aborted.
        breaks: How likely a batch of it fails.
    """
    rng = random.Random(key_of(seed, number))
    ends: list[int] = []
    for _ in range(rng.randint(1, 3)):
        ends.append((ends[-1] if ends else 0) + rng.randint(1, 3))
    aborter = rng.choice(("prefill", "decode")) if rng.random() < aborts else ""
    trigger = rng.choice(TRIGGERS[aborter]) if aborter else ""
    if trigger == "gap" and len(ends) == 1:
        ends.append(ends[0] + 2)
    broken = rng.random() < breaks and trigger not in ("unmet", "unsent")
    delay = rng.random() * (0.0 if rng.random() < 0.3 else 0.002)
    gap = 0.004 if aborter == "decode" and trigger == "gap" else rng.choice((0.0, 0.0, 0.001))
    key = key_of(seed, number, 1)
    # A broken room may hold its id for good.
    return Plan(
        number,
        1_000_000 + number if broken else 1 + number % IDS,
        tuple(ends),
        aborter,
        trigger,
        delay,
        gap,
        broken,
        key,
    )
