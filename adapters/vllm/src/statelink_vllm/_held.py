"""Blocks of failed requests to which something may still be written.

vLLM has one report for "the request waits no longer" and "its blocks are free". If a prefill server is lost, the
request must go on, and its blocks must not be used. So they get one more reference in vLLM's own pool of blocks, until
every rank says that nothing writes to them any more.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._messages import FromWorker

__all__ = ["HeldBlocks"]

log = logging.getLogger("vllm.statelink")


class HeldBlocks:
    """Holds such blocks. Runs on the thread of the engine core."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._unquiet: Counter[str] = Counter()
        """For each request, ranks whose memory may still be written."""
        self._blocks: dict[str, list[Any]] = {}

    def bind(self, pool: Any) -> None:
        """Take vLLM's pool of blocks."""
        self._pool = pool

    def told(self, said: FromWorker) -> None:
        """Take what the ranks said. Give back the blocks of requests that are quiet on every rank."""
        self._unquiet.update(said.unquiet)
        self._unquiet.subtract(said.quiet)
        for name in [name for name, count in self._unquiet.items() if count <= 0]:
            del self._unquiet[name]
            blocks = self._blocks.pop(name, None)
            if blocks is not None:
                self._pool.free_blocks(reversed(blocks))
                log.info("nothing writes to the %d blocks of request %s any more", len(blocks), name)

    def ended(self, name: str, ids: Iterable[int]) -> None:
        """Hold the blocks of a request that vLLM is about to free, if a rank's memory may still be written."""
        if not self._unquiet.get(name):
            return
        blocks = [self._pool.blocks[number] for number in sorted(ids) if number]
        self._pool.touch(blocks)
        self._blocks[name] = blocks
        log.warning("%d blocks of failed request %s are held: something may still write to them", len(blocks), name)

    def __bool__(self) -> bool:
        """Whether blocks are held."""
        return bool(self._blocks)
