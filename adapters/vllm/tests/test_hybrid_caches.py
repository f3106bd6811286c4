"""Caches of models with Mamba2 layers and attention, whose groups overlay each other: other widths and block sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.caches import Cache, attention, hand, make_cache, model_of, recurrent, sides
from support.layers import HEADS, KINDS, LAYERS, TOKENS, heads_of, read, truth_of, write

pytestmark = pytest.mark.smoke

PAGES, STATES = 0, (1, 2)
"""Groups of layers: of attention, and of Mamba2."""


def hybrid(kind: str, width: int, block: int) -> list[tuple[Cache, Any]]:
    """The ranks of a side. As in vLLM, pages of attention are as large as the padded pages of recurrent states."""
    layer, made = KINDS[kind], []
    for rank in range(width):
        pages = attention(HEADS // width, block)
        conv = (2, len(layer.share(rank, width)))
        state = recurrent(
            layer.kind,
            conv,
            (layer.heads // width, 4, 3),
            page=pages.page_size_bytes,
            block=block,
            mamba_cache_mode="align",
        )
        model = model_of((rank, width), HEADS, groups=layer.blocks[-1][1])
        made.append((make_cache([(pages, LAYERS), (state, (1, 4)), (state, (2, 5))]), model))
    return made


def tables_of(tokens: int, block: int) -> list[list[int]]:
    """Block tables of a request: pages in falling order, and of each recurrent group only the last block is held."""
    count = -(-tokens // block)
    pages = [2 * number + 2 for number in range(count)][::-1]
    return [pages, *([0] * (count - 1) + [2 * count + 3 + number] for number in range(len(STATES)))]


@pytest.mark.parametrize("kind", ["Mamba2", "Mamba2 with one group"])
@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)])
@pytest.mark.parametrize("prefix", [0, 32])
def test_states_and_pages_arrive_together_at_every_width_and_block_size(
    kind: str, widths: tuple[int, int], sizes: tuple[int, int], prefix: int
) -> None:
    layer, truth = KINDS[kind], truth_of(21, HEADS, 16)
    states = layer.truth(groups=3, layers=2)
    source, target = (tables_of(TOKENS, size) for size in sizes)
    with sides(*(hybrid(kind, *each) for each in zip(widths, sizes, strict=True))) as (sources, targets):
        for rank in sources:
            write(rank, PAGES, source[PAGES], truth, range(TOKENS))
            for group in STATES:
                for ours, right in layer.pairs(rank, group, source[group][-1], states):
                    ours[:] = right
        hand(sources, targets, TOKENS, prefix, source, target)
        for rank in targets:
            arrived = read(rank, PAGES, target[PAGES], range(prefix, TOKENS))
            assert torch.equal(arrived, truth[list(LAYERS)][:, prefix:, heads_of(rank)])
            for group in STATES:
                for ours, right in layer.pairs(rank, group, target[group][-1], states):
                    assert torch.equal(ours, right)


@pytest.mark.parametrize(("tokens", "count"), [(75, 96), (64, 64)])
def test_what_is_left_over_behind_the_last_token_is_zeroed(tokens: int, count: int) -> None:
    """Of decode's last block of 32 tokens, prefill's last block of 16 covers the first half."""
    source, target = tables_of(tokens, 16), tables_of(tokens, 32)
    with sides(hybrid("Mamba2", 1, 16), hybrid("Mamba2", 1, 32)) as ((prefill,), (decode,)):
        for tensor in prefill.tensors(PAGES).values():
            tensor[:] = 1.0
        for tensor in decode.tensors(PAGES).values():
            tensor[:] = torch.nan
        hand([prefill], [decode], tokens, 32, source, target)
        arrived = -(-tokens // 16) * 16
        found = read(decode, PAGES, target[PAGES], range(count))
        assert found[:, :32].isnan().all(), "something of the prefix was touched"
        assert (found[:, 32:arrived] == 1.0).all()
        assert (found[:, arrived:] == 0.0).all()


@pytest.mark.parametrize("local", [{"window": 32}, {"chunk": 48}], ids=str)
def test_what_is_left_over_in_front_of_a_window_is_zeroed(local: dict[str, int]) -> None:
    """Of tokens 32 to 63, those from 48 on come. Where no layer is recurrent, vLLM zeroes nothing."""

    def side(block: int, *, recurrent_too: bool) -> list[tuple[Cache, Any]]:
        window = attention(HEADS, block, **local)
        groups = [(window, LAYERS)]
        if recurrent_too:
            state = recurrent("MAMBA1", (2, 8), (8, 4), page=window.page_size_bytes, block=block)
            groups.append((state, (1, 4)))
        return [(make_cache(groups), model_of((0, 1), HEADS))]

    for recurrent_too in (True, False):
        with sides(side(16, recurrent_too=recurrent_too), side(32, recurrent_too=recurrent_too)) as sided:
            (prefill,), (decode,) = sided
            for rank, value in ((prefill, 1.0), (decode, torch.nan)):
                for tensor in rank.tensors(0).values():
                    tensor[:] = value
            tables = [[0, 0, 0, 2, 3, 4], [7]], [[0, 3, 4], [8]]
            hand([prefill], [decode], 84, 0, *tables)
            found = read(decode, 0, tables[1][0], range(32, 96))
            assert (found[:, 16:] == 1.0).all()
            assert (found[:, :16] == 0.0).all() if recurrent_too else found[:, :16].isnan().all()
