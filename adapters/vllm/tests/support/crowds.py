"""Many requests over two engines, while clients leave and engines die."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.engines import Engine, Pair

__all__ = ["SIDES", "Crowd"]

SIDES = "prefill", "decode"
LEAVES = 0.06
"""How likely a client is to leave while an engine has its request."""


class Crowd:
    """Requests behind a router, and what has happened to them.

    Args:
        pair: The engines.
        alone: An engine that does nothing else.
        seed: Of everything that is left to chance.

    Attributes:
        seen: How often each thing has happened.
    """

    def __init__(self, pair: Pair, alone: Engine, seed: int) -> None:
        self.pair, self.alone = pair, alone
        self.chance = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def engine(self, side: str) -> Engine:
        """The engine of a side, one of `SIDES`."""
        found: Engine = getattr(self.pair, side)
        return found

    def leave(self, side: str, names: Iterable[str]) -> list[str]:
        """Some clients leave while an engine has their requests. Returns the names of these."""
        gone = [name for name in names if self.chance.random() < LEAVES]
        for name in gone:
            self.engine(side).abort(name)
        self.seen[f"left {side}"] += len(gone)
        return gone

    def replace(self, side: str) -> Engine:
        """An engine dies, and another one is in its place."""
        self.count(side)
        self.engine(side).kill()
        made = self.pair.start(side).wait_ready()
        setattr(self.pair, side, made)
        return made

    def count(self, side: str) -> None:
        """Count whose state an engine has received, and whom it has preempted, before it ends."""
        said = self.engine(side).ask()
        self.seen[f"{side} received"] += said["rooms"].get("decode", {}).get("succeeded", 0)
        self.seen[f"{side} preempted"] += said["preempted"]
