"""Requests whose state prefill holds, and which may never reach decode.

Decode's server refuses some, a router mixes answers up, and clients leave between the two servers. Nobody tells
prefill. A decode that knows a request asks for it as soon as it has memory. Until then it says every few seconds that
the state has to be kept. So a request is late if no decode has said a word of it for longer. Late requests keep their
blocks while these are few, and while no other request waits for them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Unclaimed"]

log = logging.getLogger("vllm.statelink")

ASK_SECONDS = 4.0
"""After so long, the ranks are asked whether decode has said a word of a request."""
LATE_SECONDS = 5.0
"""After so long without a word of decode, a request is late. More than twice the pause of `Leases`."""
LATE_SHARE = 0.25
"""The part of the blocks that late requests may hold. The others serve requests that run, and the prefix cache."""
TURN_SHARE = 0.5
"""The same for turns of conversations."""
LOOK_SECONDS = 1.0
"""Least seconds between two looks at these shares, which count blocks one by one."""
LOG_SECONDS = 10.0
"""Least seconds between two lines of the log."""
HINT = (
    "do all requests reach decode, and soon? Look for requests that decode's server refuses, for clients that leave "
    "between the two servers, and for a router that waits, or mixes answers up"
)


class _Held(NamedTuple):
    """A request whose state is held.

    Attributes:
        since: When its state began to be held, when a rank last said that decode has said a word of it, or when the
            ranks were told to give it up.
        blocks: Its blocks.
        asked: Whether the ranks were asked about it since then.
        why: Why the ranks were told to give it up; empty if they were not, or if decode has said a word of it.
        turn: Whether it was held for a turn to come. That none comes is no mistake.
    """

    since: float
    blocks: frozenset[int]
    asked: bool = False
    why: str = ""
    turn: bool = False


class Unclaimed:
    """Chooses the requests that all ranks give up. Runs on the thread of the engine core.

    All ranks give up the same requests in the same step, because one place chooses. Only the ranks know what decode has
    said: they are asked first, and none gives up a request of which it has just heard a word.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: dict[str, _Held] = {}
        """In the order of ``since``."""
        self._turns: dict[str, _Held] = {}
        """Those that are held for a turn of a conversation to come, the oldest first. They are late at once."""
        self._pressed = False
        """Whether a request that runs lacked a block in this step."""
        self.ending = False
        """Whether this server ends, so that it holds no turns."""
        self._look = 0.0
        """When the share is looked at again."""
        self._count = 0
        """Requests that were given up since the last line of the log."""
        self._log = 0.0
        """When the next line may be written."""

    def bind(self, pool: Any) -> None:
        """Take vLLM's pool of blocks."""
        self._pool = pool

    def add(self, name: str, tables: Iterable[Iterable[int]], *, turn: bool = False) -> None:
        """The state of a request begins to be held, in these blocks; with ``turn``, for a turn to come."""
        held = self._turns if turn else self._held
        held[name] = _Held(time.monotonic(), frozenset(block for table in tables for block in table if block))

    def give_way(self) -> bool:
        """A request that runs lacks a block. Returns whether blocks come back, so that none has to be preempted.

        Called before `choose`, in the same step.
        """
        self._pressed = bool(self._turns) or any(each.why for each in self._held.values())
        return self._pressed

    def ended(self, name: str) -> None:
        """The state of a request is not held any more."""
        self._turns.pop(name, None)
        each = self._held.pop(name, None)
        if each is None or not each.why or each.turn:
            return
        self._count += 1
        now = time.monotonic()
        if now >= self._log:
            log.warning(
                "requests of which no decode had said a word were given up: %d, the last one because %s; %s",
                self._count,
                each.why,
                HINT,
            )
            self._count, self._log = 0, now + LOG_SECONDS

    def claimed(self, names: Iterable[str]) -> None:
        """Decode has said a word of these requests. They are asked about again later, since a decode may be lost."""
        for name in names:
            each = self._held.pop(name, None) or self._turns.pop(name, None)
            if each is not None:
                self._held[name] = _Held(time.monotonic(), each.blocks)

    def choose(self, short: int) -> dict[str, str]:
        """The requests to give up in this step, and why: the oldest first. See `ToWorker.unclaimed`.

        Args:
            short: Blocks that a request which waits needs beyond those that are free.
        """
        now = time.monotonic()
        silent = dict(itertools.takewhile(lambda item: item[1].since + ASK_SECONDS <= now, self._held.items()))
        late = {name: each for name, each in silent.items() if each.asked and each.since + LATE_SECONDS <= now}
        short, self._pressed = max(short, int(self._pressed)), False
        chosen: dict[str, str] = {}
        if (late or self._turns) and now >= self._look:
            self._look = now + LOOK_SECONDS
            chosen = self._beyond_share(late, LATE_SHARE) | self._beyond_share(self._turns, TURN_SHARE)
        if self.ending:
            chosen |= dict.fromkeys(self._turns, "this server ends")
        late |= self._turns
        if late and short > 0:
            chosen |= self._for_another(late, short, chosen)
        for name, why in chosen.items():
            turn = name in self._turns
            each = self._turns.pop(name) if turn else self._held.pop(name)
            self._held[name] = _Held(now, each.blocks, why=why, turn=turn)
        for name, each in silent.items():
            if not each.asked:  # after a pause without steps it is late only when the ranks had time to answer
                self._held[name], chosen[name] = _Held(now - ASK_SECONDS, each.blocks, asked=True), ""
        return chosen

    def _beyond_share(self, late: Mapping[str, _Held], share: float) -> dict[str, str]:
        """Such requests, so that the others of them hold no more than their share."""
        most = int(share * self._pool.num_gpu_blocks)
        if sum(len(each.blocks) for each in late.values()) <= most:  # some may be shared, and count more than once
            return {}
        holders = Counter(block for each in late.values() for block in each.blocks)
        held, chosen = len(holders), {}
        for name, each in late.items():
            if held <= most:
                break
            chosen[name] = f"such requests held {held} blocks, and may hold {most}"
            holders.subtract(each.blocks)
            held -= sum(not holders[block] for block in each.blocks)
        return chosen

    def _for_another(self, late: Mapping[str, _Held], short: int, chosen: Mapping[str, str]) -> dict[str, str]:
        """Further late requests, so that another request finds the blocks that it lacks."""
        leaving: Counter[int] = Counter()
        for name, each in self._held.items():
            if name in chosen or (each.why and name not in late):  # their blocks are about to come back
                short -= self._freed(each, leaving)
        made: dict[str, str] = {}
        for name, each in late.items():
            if short <= 0:
                break
            if name not in chosen:
                made[name] = f"another request lacked {short} blocks"
                short -= self._freed(each, leaving)
        return made

    def _freed(self, each: _Held, leaving: Counter[int]) -> int:
        """How many blocks become free with a request, after those that ``leaving`` counts."""
        leaving.update(each.blocks)
        return sum(self._pool.blocks[block].ref_cnt == leaving[block] for block in each.blocks)

    def __bool__(self) -> bool:
        """Whether the state of any request is held."""
        return bool(self._held or self._turns)
