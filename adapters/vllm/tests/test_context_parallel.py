"""Decode context parallelism: vLLM deals the tokens of a request out over ranks, which all have the same heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.caches import Rank, attention, hand, latent, make_cache, model_of, sides
from support.layers import LAYERS, blocks, truth_of

from statelink import state

pytestmark = pytest.mark.smoke

TOKENS, BLOCK = 150, 16


def side(spec: Any, ranks: int, interleave: int, heads: int) -> list[tuple[Any, ...]]:
    return [
        (
            make_cache([(spec, LAYERS)]),
            model_of((rank, ranks), heads)._replace(positions=state.Partition("cyclic", ranks, rank, interleave)),
        )
        for rank in range(ranks)
    ]


def place(rank: Rank, table: list[int], token: int, interleave: int) -> tuple[int, int] | None:
    """The block and the row of a token on a rank, by vLLM's rule; ``None`` if another rank has it.

    A block of the table stands for the block's tokens on every rank. In it, ``interleave`` tokens go to each rank in
    turn (``vllm/v1/worker/block_table.py``).
    """
    number, ranks = rank.tp
    virtual = BLOCK * ranks
    offset = token % virtual
    if offset // interleave % ranks != number:
        return None
    row = offset // (interleave * ranks) * interleave + offset % interleave
    return table[token // virtual], row


@pytest.mark.parametrize("kind", ["latents", "one head"])
@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("prefix", [0, 64])
def test_equal_ranks_hand_over_their_own_tokens(kind: str, interleave: int, ranks: int, prefix: int) -> None:
    spec = latent(BLOCK) if kind == "latents" else attention(1, BLOCK)
    truth = truth_of(7, 1, 24 if kind == "latents" else 16)
    truth = torch.cat([truth, truth + 1], dim=1)
    pair = [side(spec, ranks, interleave, 1) for _ in range(2)]
    with sides(*pair) as (sources, targets):
        count = -(-TOKENS // (BLOCK * ranks))
        tables = blocks(5, count), blocks(6, count)
        held = [0, 0]
        for rank in sources:
            for layer, tensor in rank.tensors(0).items():
                for token in range(TOKENS):
                    found = place(rank, tables[0], token, interleave)
                    if found:
                        tensor[found[0], 0, found[1]] = truth[layer, token, 0]
        hand(sources, targets, TOKENS, prefix, [tables[0]], [tables[1]])
        for rank in targets:
            for layer, tensor in rank.tensors(0).items():
                for token in range(TOKENS):
                    found = place(rank, tables[1], token, interleave)
                    if found:
                        same = torch.equal(tensor[found[0], 0, found[1]], truth[layer, token, 0])
                        assert same == (token >= prefix), (rank.tp, layer, token)
                        held[same] += 1
        assert held == [prefix * len(LAYERS), (TOKENS - prefix) * len(LAYERS)]
