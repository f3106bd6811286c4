"""What layers hold on ranks of any width: tokens in pages of attention, and recurrent states of several kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .caches import BLOCKS, Cache, Rank, make_cache, model_of, recurrent

__all__ = ["HEADS", "KINDS", "LAYERS", "TOKENS", "Recurrent", "blocks", "heads_of", "read", "truth_of", "write"]

HEADS, LAYERS, TOKENS = 4, (0, 3), 75


def blocks(seed: int, count: int) -> list[int]:
    """Blocks of a request in no order, and never the null block."""
    return (torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(seed))[:count] + 1).tolist()


def heads_of(rank: Rank) -> range:
    number, width = rank.tp
    each = max(HEADS // width, 1)
    first = number * HEADS // width
    return range(first, first + each)


def write(rank: Rank, group: int, table: Sequence[int], truth: torch.Tensor, held: range) -> None:
    """Write tokens into the places where vLLM's attention has them."""
    for layer, tensor in rank.tensors(group).items():
        for token in held:
            place = tensor[_block(table, token, tensor), :, token % tensor.shape[2]]
            place[:] = truth[layer, token, heads_of(rank) if truth.shape[2] > 1 else slice(None)]


def read(rank: Rank, group: int, table: Sequence[int], held: range) -> torch.Tensor:
    """The tokens of the group as vLLM's attention reads them: ``[layers, tokens, heads, content]``."""
    tensors = rank.tensors(group).values()
    return torch.stack(
        [torch.stack([t[_block(table, each, t), :, each % t.shape[2]] for each in held]) for t in tensors]
    )


def _block(table: Sequence[int], token: int, tensor: torch.Tensor) -> int:
    """The first axis has blocks, or the parts into which attention splits them."""
    split = tensor.shape[0] // BLOCKS
    part = token // tensor.shape[2]
    block: int = table[part // split] * split + part % split
    return block


def truth_of(seed: int, heads: int, content: int) -> torch.Tensor:
    return torch.rand((max(LAYERS) + 1, TOKENS, heads, content), generator=torch.Generator().manual_seed(seed))


class Recurrent:
    """A kind of recurrent layer: its blocks of channels, each by the heads or groups that share it out."""

    def __init__(self, kind: str, heads: int, blocks: Sequence[tuple[int, int]]) -> None:
        self.kind, self.heads, self.blocks = kind, heads, blocks

    def share(self, rank: int, width: int) -> list[int]:
        """The channels of a rank."""
        found: list[int] = []
        before = 0
        for channels, units in self.blocks:
            each = channels // units
            first = rank * units // width
            found += range(before + first * each, before + (first + max(units // width, 1)) * each)
            before += channels
        return found

    def side(self, width: int, channels_first: bool, page: int | None) -> list[tuple[Cache, Any]]:
        made = []
        for rank in range(width):
            channels = len(self.share(rank, width))
            conv = (channels, 2) if channels_first else (2, channels)
            spec = recurrent(self.kind, conv, (self.heads // width, 4, 3), page=page)
            groups = self.blocks[-1][1] if self.kind == "MAMBA2" else None
            model = model_of((rank, width), groups=groups, channels_first=channels_first)
            made.append((make_cache([(spec, (1,)), (spec, (2,))]), model))
        return made

    def truth(self, groups: int, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All convolutions ``[groups, layers, channels, 2]``, and states ``[groups, layers, heads, 4, 3]``."""
        draw = torch.Generator().manual_seed(11)
        total = sum(channels for channels, _ in self.blocks)
        conv = torch.rand((groups, layers, total, 2), generator=draw)
        return conv, torch.rand((groups, layers, self.heads, 4, 3), generator=draw)

    def pairs(
        self,
        rank: Rank,
        group: int,
        block: int,
        truth: tuple[torch.Tensor, torch.Tensor],
        channels_first: bool = False,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of what a rank has of a request, as vLLM's layers read it, each with what of `truth` belongs there."""
        channels, (number, width) = self.share(*rank.tp), rank.tp
        end, count = len(channels) * 8, self.heads // width
        for layer, tensor in enumerate(rank.tensors(group).values()):
            raw = tensor[block].flatten()
            conv = raw[:end].view(torch.float32).view((-1, 2) if channels_first else (2, -1))
            yield conv if channels_first else conv.T, truth[0][group, layer, channels]
            heads = raw[end:][: count * 48].view(torch.float32).view(-1, 4, 3)
            yield heads, truth[1][group, layer, number * count :][:count]


KINDS = {
    "Mamba2": Recurrent("MAMBA2", 4, [(16, 4), (6, 2), (6, 2)]),
    "Mamba2 with one group": Recurrent("MAMBA2", 4, [(16, 4), (3, 1), (3, 1)]),
    "gated delta net": Recurrent("GDN_ATTN", 4, [(6, 2), (6, 2), (16, 4)]),
}
