"""Ratios of times that were taken in turn. On a shared machine, only these mean anything."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

__all__ = ["Ratio", "in_turn", "ratio"]

RESAMPLES = 2000
ROUNDED = 3

T = TypeVar("T")


class Ratio(NamedTuple):
    """The median of the quotients of pairs, and the bounds that it has in 95 of 100 resamples."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """How many times as long the first of each pair took as the second. Both have one entry for each pair."""
    quotients = np.array(ours) / np.array(theirs)
    drawn = np.random.default_rng(0).integers(0, len(quotients), (RESAMPLES, len(quotients)))
    low, high = np.quantile(np.median(quotients[drawn], axis=1), [0.025, 0.975])
    return Ratio(*(round(float(each), ROUNDED) for each in (statistics.median(quotients), low, high)))


def in_turn(ways: Mapping[str, Callable[[], T]], rounds: int, warm: int = 2) -> Iterator[dict[str, T]]:
    """Take every way once a round, forwards and backwards in turn, so that none profits from coming last.

    Args:
        ways: Each does its work, and returns what it measured, such as the seconds that it took.
        rounds: Rounds that count.
        warm: Rounds before those, which touch fresh pages and open connections.
    """
    for number in range(rounds + warm):
        took = {name: ways[name]() for name in (list(ways) if number % 2 else reversed(list(ways)))}
        if number >= warm:
            yield took
