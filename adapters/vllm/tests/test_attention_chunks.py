"""Chunked local attention: the blocks that vLLM's own manager of the cache keeps, and what arrives in them.

Block tables here come from vLLM, null blocks and prefix hits included. Links are real, and every token is compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.caches import Cache, Rank, attention, hand, make_cache, model_of, sides
from support.layers import HEADS, TOKENS, read, truth_of, write
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from statelink.errors import StatelinkError
from statelink_vllm.connector import describe_cache

pytestmark = pytest.mark.smoke

FULL, CHUNKED = 0, 1
"""The groups of layers of a cache."""
CHUNK = 32
TRUTH = truth_of(31, HEADS, 16)


def cache_of(block: int, chunk: int = CHUNK, kernel: int | None = None) -> Cache:
    groups = [(attention(HEADS, block), (0, 3)), (attention(HEADS, block, chunk=chunk), (1, 2))]
    return make_cache(groups, kernel=kernel)


def seen_from(position: int, chunk: int) -> int:
    """The first position that a token attends to."""
    return next(t for t in range(position + 1) if t // chunk == position // chunk)


class Server:
    """A rank, and vLLM's manager of its blocks."""

    def __init__(self, rank: Rank, block: int) -> None:
        init_none_hash(sha256)
        self.rank, self._block = rank, block
        self._hasher = get_request_block_hasher(block, sha256)
        self.manager: Any = KVCacheManager(
            rank.cache.config,
            max_model_len=TOKENS + 1,
            scheduler_block_size=block,
            hash_block_size=block,
            max_in_flight_tokens=TOKENS + 1,
        )

    def request(self, name: str, tokens: int) -> Request:
        return Request(name, [*range(tokens)], SamplingParams(max_tokens=1), None, block_hasher=self._hasher)

    def prefill(self, name: str, tokens: int) -> tuple[Request, list[list[int]]]:
        """Compute a prompt in two steps. Returns the tables of its blocks, as the connector gets them."""
        request = self.request(name, tokens)
        for first, last in ((0, tokens // 2), (tokens // 2, tokens)):
            if first < last:
                assert self.manager.allocate_slots(request, last - first) is not None
                for group, table in enumerate(self.manager.get_block_ids(name)):
                    write(self.rank, group, table, TRUTH, range(first, last))
                request.num_computed_tokens = last
        # vLLM gives back what is behind a request with its next step. Here that is before the state is sent.
        self.manager.coordinator.remove_skipped_blocks(name, tokens)
        return request, list(map(list, self.manager.get_block_ids_for_computed_tokens(name, tokens)))

    def hit(self, name: str, tokens: int) -> tuple[Request, Any, int]:
        """A request whose last token decode computes, and what is here of the tokens before it."""
        request = self.request(name, tokens + 1)
        blocks, count, _ = self.manager.get_computed_blocks(request)
        return request, blocks, count

    def expect(self, name: str, tokens: int) -> tuple[Request, list[list[int]], int]:
        """Blocks for such a request, as vLLM's scheduler gets them, and how many of its tokens are here."""
        request, blocks, count = self.hit(name, tokens)
        lacks = tokens - count
        made = self.manager.allocate_slots(
            request,
            0 if lacks else 1,
            count,
            blocks,
            num_external_computed_tokens=lacks,
            delay_cache_blocks=lacks > 0,
        )
        assert made is not None
        return request, list(map(list, self.manager.get_block_ids(name))), count

    def received(self, request: Request, tokens: int) -> None:
        """The state is here, and the request ends: vLLM keeps its full blocks for other requests."""
        request.num_computed_tokens = tokens
        self.manager.cache_blocks(request, tokens)
        self.manager.free(request)

    def holds(self, group: int, table: Sequence[int], held: range) -> bool:
        """Whether these tokens of a request are there."""
        layers = list(self.rank.tensors(group))
        return not held or torch.equal(read(self.rank, group, table, held), TRUTH[layers][:, list(held)])


@contextlib.contextmanager
def servers(blocks: tuple[int, int], chunk: int = CHUNK, kernel: int | None = None) -> Iterator[tuple[Server, Server]]:
    """Prefill and decode with blocks of such sizes. Attention may split those of decode."""
    made = ([(cache_of(block, chunk, part), model_of())] for block, part in zip(blocks, (None, kernel), strict=True))
    with sides(*made) as ((source,), (target,)):
        yield Server(source, blocks[0]), Server(target, blocks[1])


@pytest.mark.shows("caches: chunked local attention, as vLLM's own manager keeps it")
@pytest.mark.parametrize(("blocks", "kernel"), [((16, 16), None), ((16, 32), None), ((32, 16), None), ((16, 32), 16)])
@pytest.mark.parametrize("tokens", [1, 20, 31, 32, 33, 47, 48, 63, 64, 65, 75])
def test_the_chunk_of_the_token_that_decode_computes_arrives(
    tokens: int, blocks: tuple[int, int], kernel: int | None
) -> None:
    first = seen_from(tokens, CHUNK)
    with servers(blocks, kernel=kernel) as (source, target):
        _, tables = source.prefill("one", tokens)
        kept = [number for number, block in enumerate(tables[CHUNKED]) if block]
        assert kept == [*range(first // blocks[0], -(-tokens // blocks[0]))], "vLLM keeps other blocks"
        _, into, count = target.expect("one", tokens)
        assert count == 0
        (room,) = hand([source.rank], [target.rank], tokens, 0, tables, into)
        assert target.holds(FULL, into[FULL], range(tokens))
        assert target.holds(CHUNKED, into[CHUNKED], range(first, tokens))
        # Both groups have as many bytes a token. Nothing moves but the chunk, and what shares a page with it.
        moved = {"chunked_local": 0, **{name: each.nbytes for name, each in room.report.moved.items()}}
        page = min(target.rank.groups[CHUNKED].component.page, blocks[0])
        pages = -(-tokens // page)
        assert moved["chunked_local"] * pages == moved["kv"] * (pages - first // page if first < tokens else 0)


@pytest.mark.parametrize("longer", [33, 40, 48, 63, 64, 65, 75])
@pytest.mark.parametrize("tokens", [15, 16, 31, 40, 64, 70])
def test_after_a_prefix_that_decode_holds(tokens: int, longer: int) -> None:
    """vLLM takes blocks in front of a chunk for computed, and names the null block for them."""
    with servers((16, 16)) as (source, target):
        for name, count in (("first", tokens), ("second", longer)):
            computed, tables = source.prefill(name, count)
            request, into, prefix = target.expect(name, count)
            assert (prefix > 0) == (name == "second" and tokens >= 16)
            if prefix < count:
                hand([source.rank], [target.rank], count, prefix, tables, into)
            assert target.holds(FULL, into[FULL], range(count))
            assert target.holds(CHUNKED, into[CHUNKED], range(seen_from(count, CHUNK), count))
            target.received(request, count)
            source.manager.free(computed)


def test_nobody_looks_in_front_of_the_place_where_a_chunk_begins() -> None:
    """Of tokens 16 to 31, those from 24 on come. vLLM keeps the block, and no request that finds it reads the rest."""
    tokens, found = 45, set()
    with servers((8, 16), chunk=24) as (source, target):
        _, tables = source.prefill("one", tokens)
        request, into, _ = target.expect("one", tokens)
        (room,) = hand([source.rank], [target.rank], tokens, 0, tables, into)
        group = target.rank.groups[CHUNKED]
        indices = group.indices(into[CHUNKED], tokens, 0)
        assert not group.lacking(indices, room.report.moved["chunked_local"].nbytes)
        assert target.holds(CHUNKED, into[CHUNKED], range(24, tokens))
        assert not target.holds(CHUNKED, into[CHUNKED], range(16, 24))
        target.received(request, tokens)
        for count in range(1, TOKENS):
            _, blocks, hit = target.hit(f"of {count}", count)
            table = blocks.get_block_ids()[CHUNKED]
            for position in range(hit, count + 1):
                first = seen_from(position, 24)
                assert target.holds(CHUNKED, table, range(first, min(hit, position)))
            found.add((hit, tuple(number for number, block in enumerate(table) if block)))
    assert (32, (1,)) in found, "no request finds the block"


@pytest.mark.parametrize(("tokens", "table"), [(40, [3, 4, 0]), (75, [0, 0, 0, 0, 0]), (63, [1, 2, 0, 4])])
def test_a_block_of_the_chunk_that_is_gone_is_named(tokens: int, table: list[int]) -> None:
    cache = cache_of(16)
    _, groups = describe_cache(cache.config, cache.tensors, model_of())
    with pytest.raises(StatelinkError, match="'chunked_local' is not held any more"):
        groups[CHUNKED].indices(table, tokens, 0)


def test_chunks_of_another_size_are_refused_by_name() -> None:
    pair = ([(cache_of(16, chunk), model_of())] for chunk in (32, 64))
    with (
        sides(*pair) as (one, other),
        pytest.raises(StatelinkError, match="chunked_local: group: 64 on decode, 32 on prefill"),
    ):
        hand(one, other, 16, 0, [[1], [2]], [[1], [2]])


def test_a_side_that_keeps_every_token_of_these_layers_is_refused_by_name() -> None:
    """So does vLLM without its hybrid manager: then a specification of full attention has the size of a chunk."""
    every = make_cache([(attention(HEADS, attention_chunk_size=CHUNK), (0, 1, 2, 3))])
    with (
        sides([(cache_of(16), model_of())], [(every, model_of())]) as (one, other),
        pytest.raises(StatelinkError, match=r"component chunked_local .*: absent on decode, present on prefill"),
    ):
        hand(one, other, 16, 0, [[1], [2]], [[1]])
