"""Functions that run in a worker: calls of a backend while a peer of it is stopped, or gets much else."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

from statelink.backend import Batch, Transfer

from . import _inside
from ._worker import REST_SECONDS, Finding, Unexpected, unexpected

if TYPE_CHECKING:
    from statelink.backend import Outcome

    from ._inside import Move
    from ._worker import Host, Opened

__all__ = ["BRIEFLY_SECONDS", "MOST_TOGETHER"]

LARGE_BYTES = 4 << 20
MOST_TOGETHER = 8
"""Most transfers that are under way at once, of those that a backend takes."""
BRIEFLY_SECONDS = 0.5
"""Seconds for which transfers to a stopped peer are polled."""


def submitted(host: Host, each: Move) -> None:
    """Submit as much to a peer as it may have under way at once, and poll it for a moment. Waits for no transfer."""
    opened = host.backends[each.link]
    running = _submit(opened, each)
    until = time.monotonic() + BRIEFLY_SECONDS
    while time.monotonic() < until:
        with opened.turn:
            opened.backend.poll([transfer for transfer in running if transfer.outcome is None])
        time.sleep(REST_SECONDS)


def others(host: Host, stuck: Move, other: Move, patience: float) -> list[Outcome]:
    """Submit batches to one peer on a thread of their own, and then move one to another peer. Returns how that ended.

    Args:
        host: This process.
        stuck: The batches that may hang.
        other: What has to move meanwhile.
        patience: Most seconds for that.
    """
    begun(host, stuck)
    return _inside.move(host, other, patience)


def begun(host: Host, each: Move) -> None:
    """Submit batches to a peer on a thread of their own, which may hang. Returns after a moment."""
    opened, failures = host.backends[each.link], list[BaseException]()

    def work() -> None:
        try:
            host.kept["begun"] = _submit(opened, each)
        except Unexpected as error:
            failures.append(error)
        except Exception as error:
            failures.append(unexpected(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(BRIEFLY_SECONDS)
    if failures:
        raise failures[0]


def overtaken(host: Host, large: Move, small: Move, most: int, patience: float) -> int:
    """Submit a small batch while large ones to the same peer follow each other without a gap.

    Args:
        host: This process.
        large: What is moved again and again, in batches of `LARGE_BYTES`.
        small: Moved once, as soon as some of the large ones are under way.
        most: After so many large batches, no more follow.
        patience: Most seconds in which the last transfers have to end.

    Returns:
        How many of the large batches that were submitted after the small one had ended before it, at most ``most``.
    """
    opened = host.backends[large.link]
    limits = opened.backend.capabilities
    together = min(limits.max_transfers, MOST_TOGETHER) - 1
    pieces = large.blocks.pieces(limits.max_blocks, min(limits.max_bytes, LARGE_BYTES))
    batches = [Batch(piece, large.room, large.generation) for piece in pieces]
    numbers = itertools.count()

    def submit() -> Transfer:
        return opened.submit(large.peer, batches[next(numbers) % len(batches)])

    before = [submit() for _ in range(together)]
    waits = opened.submit(small.peer, Batch(small.blocks, small.room, small.generation))
    after: list[Transfer] = []
    ended = 0
    until = time.monotonic() + patience
    while waits.outcome is None and ended < most and time.monotonic() < until:
        running = [each for each in (*before, *after) if each.outcome is None]
        with opened.turn:
            opened.backend.poll([*running, waits])
        if waits.outcome is None:
            ended = sum(each.outcome is not None for each in after)
            after += [submit() for _ in range(together - len(running))]
            time.sleep(REST_SECONDS)
    for transfer in (waits, *before, *after):
        outcome = opened.ended(transfer, patience)
        if not outcome.ok:
            raise Finding(f"a move failed: {outcome.reason}")
    return ended


def close(host: Host, link: str) -> None:
    """Close a backend, in its turn if its calls are serialised."""
    with host.backends[link].turn:
        _inside.close(host, link)


def _submit(opened: Opened, each: Move) -> list[Transfer]:
    """Submit pieces of a move until a backend has as many transfers to the peer as it takes."""
    limits = opened.backend.capabilities
    cut = _inside.pieces(each.blocks, limits)
    batches = [Batch(piece, each.room, each.generation) for piece in cut]
    return [opened.submit(each.peer, batch) for batch in batches[: limits.max_transfers]]
