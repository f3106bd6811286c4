"""Which parts of a prompt prefill sends before it has computed all of it: the scheduler's side.

vLLM may preempt a request at any time. It then takes its blocks, and asks no connector. So each block that is sent gets
one more reference in vLLM's own pool of blocks, in a step that the request is a part of, and loses it once every rank
says that nothing reads the block. Other requests get no such block meanwhile.

A step sends what it computes itself, each group of layers behind the event that it is computed. Blocks that a request
finds in the prefix cache may still be computed by the step that finds them: layer by layer, and so in time.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, iter_layer_specs

from ._content import content_of_request
from ._messages import Chunk, Open, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._messages import FromWorker, Tables, ToWorker

__all__ = ["EarlyChunks", "stays"]

log = logging.getLogger("vllm.statelink")

SHARE = 4
"""One block in so many has such a reference at most. A request that runs holds its blocks itself, so this bounds what
requests that were preempted or aborted keep from others until their transfers have ended."""


def _blocks_of_early_groups(cache: Any) -> dict[int, int]:
    """The groups of layers whose state never changes once it is computed, and the tokens of their blocks.

    Windows and attention chunks are not among them, because only their last tokens are needed; nor recurrent layers,
    because only their last state is.

    Args:
        cache: vLLM's ``KVCacheConfig``.

    Returns:
        By the number of a group among those that are moved.
    """
    return {
        number: group.kv_cache_spec.block_size
        for number, group in enumerate(cache.transfer_groups)
        if not group.host_resident and all(stays(spec) for spec in iter_layer_specs(group.kv_cache_spec))
    }


def stays(spec: Any) -> bool:
    """Whether layers with this specification keep the state of every token as it is once it is computed."""
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec) and spec.tokens_per_state == 1 and not spec.non_causal


def _count(table: Sequence[int]) -> int:
    return sum(block != 0 for block in table)


@dataclass
class _Progress:
    """A request of which parts may be sent before its end.

    Attributes:
        request: vLLM's ``Request``.
        room: The id of the request between the servers.
        content: Which request it is; empty before the workers have opened the room.
        sent: Its first tokens that the workers were told to send.
        chunks: How many parts they were told to send.
        given_up: Why nothing is sent any more.
    """

    request: Any
    room: int
    content: bytes = b""
    sent: int = 0
    chunks: int = 0
    given_up: str = ""


class EarlyChunks:
    """Decides which blocks are sent early, and holds them. Runs on the thread of the engine core.

    Nothing is sent early where a draft model looks more than one token ahead: what it computes of the last tokens of a
    part then depends on the tokens behind them. Nor with decode context parallelism.

    Args:
        cache: vLLM's ``KVCacheConfig``.
        config: vLLM's ``VllmConfig``.
    """

    def __init__(self, cache: Any, config: Any) -> None:
        self.ranks = 1
        """Ranks that say when a block is not read any more."""
        able = config.num_prefill_lookahead_tokens <= 1 and config.parallel_config.decode_context_parallel_size == 1
        self._blocks = blocks = _blocks_of_early_groups(cache) if able else {}
        # A draft is computed after the step. The blocks of a group that is on the host are of another pool.
        host = any(group.host_resident for group in cache.transfer_groups)
        self._whole = able and not host and not config.num_speculative_tokens
        """Whether the step that computes the end of a prompt computes all that is sent."""
        self._cache = cache
        self._step = math.lcm(*blocks.values())
        """Tokens after which a block ends in every group."""
        self._in_a_step = sum(self._step // size for size in blocks.values())
        self._most = cache.num_blocks // SHARE
        self._pool: Any = None
        self._progress: dict[str, _Progress] = {}
        self._held: dict[tuple[str, int], list[Any]] = {}
        """For each request and number of a chunk, vLLM's blocks."""
        self._count = 0
        """How many these are."""
        self._said: Counter[tuple[str, int]] = Counter()
        """How many ranks have said that nothing reads a chunk any more."""

    def bind(self, pool: Any) -> None:
        """Take vLLM's pool of blocks."""
        self._pool = pool

    def __bool__(self) -> bool:
        """Whether blocks are held."""
        return bool(self._held)

    @property
    def settled(self) -> bool:
        """Whether nothing is left of any request."""
        return not (self._progress or self._held or self._said)

    def watch(self, request: Any, room: int) -> None:
        """A request has come whose state goes to a decode that may know the room already.

        Other requests are sent at their end: decode asks for them only when prefill has answered.
        """
        streams = getattr(request, "resumable", False)
        given = request.prompt_token_ids is not None and request.prompt_embeds is None
        if (self._blocks or self._whole) and given and not streams and not request.get_skip_reading_prefix_cache():
            self._progress.setdefault(request.request_id, _Progress(request, room))

    def plan(self, output: Any, made: ToWorker) -> None:
        """Add to a step what is sent early in it.

        Args:
            output: vLLM's ``SchedulerOutput`` of the step.
            made: What the workers get with the step.
        """
        if not self._progress:
            return
        for name in output.preempted_req_ids or ():
            progress = self._progress.get(name)
            if progress is not None and progress.chunks:
                # What decode has not asked for must not wait for it, and so keep blocks from the requests that run.
                made.withdraw.add(name)
                progress.sent = 0
        if output.has_sync_kv_loads:
            # vLLM finds out after the step, and after the next one if it schedules ahead, that a load has failed. Then
            # decode must not have taken a request for complete.
            self._whole = False
        for name, count in output.num_scheduled_tokens.items():
            progress = self._progress.get(name)
            if progress is not None and not progress.given_up:
                self._plan(name, progress, count, output, made)

    def _plan(self, name: str, progress: _Progress, count: int, output: Any, made: ToWorker) -> None:
        computed, tokens = progress.request.num_computed_tokens, progress.request.num_prompt_tokens
        if computed >= tokens:
            return
        if computed < progress.sent:
            self._give_up(name, progress, "vLLM computes a part of the prompt again, because it was not loaded", made)
            return
        if not progress.content:
            progress.content = content_of_request(progress.request, tokens)
            made.open[name] = Open(progress.room, tokens, progress.content)
        tables = self._cache.select_transfer_block_ids(output.kv_connector_block_state.get_block_ids(name))
        first, left = progress.sent, self._most - self._count
        stop = min(computed + count, tokens)
        if stop < tokens:
            stop -= stop % self._step
        chosen = self._choose(tables, first, stop)
        final = stop == tokens and self._whole
        others = tuple([] if number in self._blocks else table for number, table in enumerate(tables)) if final else ()
        if sum(map(_count, (*chosen, *others))) > left:  # a part of it, and the rest with what follows
            final, others = False, ()
            stop = min(first + left // max(self._in_a_step, 1) * self._step, stop)
            chosen = self._choose(tables, first, stop)
        held = [self._pool.blocks[block] for table in (*chosen, *others) for block in table if block]
        if not held:
            return
        self._pool.touch(held)
        self._held[name, progress.chunks] = held
        self._count += len(held)
        made.chunks[name] = Chunk(progress.chunks, first, stop, chosen, final, others)
        progress.sent = stop
        progress.chunks += 1

    def _choose(self, tables: Tables, first: int, last: int) -> Tables:
        """The blocks of a range of tokens, of the early groups."""
        sizes = [self._blocks.get(number) for number in range(len(tables))]
        return tuple(
            [] if size is None else table[first // size : -(-last // size)]
            for table, size in zip(tables, sizes, strict=True)
        )

    @staticmethod
    def _give_up(name: str, progress: _Progress, why: str, made: ToWorker) -> None:
        progress.given_up = why
        log.info("the state of request %s is not sent: %s", name, why)
        made.send[name] = Send(progress.room, progress.request.num_prompt_tokens, why=why)

    def give_up(self, why: str, made: ToWorker) -> None:
        """Give up what is sent of requests that go on: what decode has of them must not be used."""
        for name, progress in self._progress.items():
            if progress.content and not progress.given_up:
                self._give_up(name, progress, why, made)

    def ended(self, name: str) -> tuple[bytes, str]:
        """A request has ended. Returns its content, if it is known, and why it was given up, if it was."""
        progress = self._progress.pop(name, None)
        return (b"", "") if progress is None else (progress.content, progress.given_up)

    def told(self, said: FromWorker) -> None:
        """Take what ranks said. Give back the blocks that are read on none of them."""
        for chunk, count in said.settled.items():
            self._said[chunk] += count
            if self._said[chunk] >= self.ranks:
                del self._said[chunk]
                held = self._held.pop(chunk)
                self._count -= len(held)
                self._pool.free_blocks(reversed(held))
