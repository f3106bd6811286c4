"""Paged keys and values of the full-attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from statelink_demo.layout import PoolLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelink_demo.shape import StateShape

__all__ = ["KvPool"]


class KvPool:
    """A key pool and a value pool per full-attention layer, `[pages, page_size, kv_heads, head_dim]` (NHD).

    Args:
        shape: The model's state.
        pages: Pages of each pool; one page id addresses all of them.
        page_size: Tokens per page.
    """

    def __init__(self, shape: StateShape, *, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._heads = shape.kv_heads
        size = (pages, page_size, shape.kv_heads, shape.head_dim)
        self.keys = {layer: torch.empty(size, dtype=shape.dtype) for layer in shape.attention_layers}
        self.values = {layer: torch.empty(size, dtype=shape.dtype) for layer in shape.attention_layers}

    def layouts(self) -> tuple[PoolLayout, ...]:
        """Describe the pools: keys of all layers, then values of all layers."""
        return tuple(
            PoolLayout(
                component="kv",
                name=name,
                layer=layer,
                index="page",
                tensor=tensor,
                axes=("token", "head", "dim"),
                heads=self._heads,
                tokens_per_item=self.page_size,
            )
            for name, pools in (("k", self.keys), ("v", self.values))
            for layer, tensor in pools.items()
        )

    def write(self, layer: int, pages: Sequence[int], start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `[1, kv_heads, tokens, head_dim]` keys and values of the tokens from position `start` on."""
        rows = self._rows(pages, start, start + keys.shape[2])
        self.keys[layer].flatten(0, 1)[rows] = keys[0].transpose(0, 1)
        self.values[layer].flatten(0, 1)[rows] = values[0].transpose(0, 1)

    def read(self, layer: int, pages: Sequence[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather copies of the first `tokens` keys and values as `[1, kv_heads, tokens, head_dim]`."""
        rows = self._rows(pages, 0, tokens)
        keys = self.keys[layer].flatten(0, 1)[rows].transpose(0, 1).unsqueeze(0).contiguous()
        values = self.values[layer].flatten(0, 1)[rows].transpose(0, 1).unsqueeze(0).contiguous()
        return keys, values

    def _rows(self, pages: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Return where the tokens at positions `[start, stop)` are in a pool seen as a list of tokens."""
        positions = torch.arange(start, stop)
        page_ids = torch.tensor(pages)[positions // self.page_size]
        return page_ids * self.page_size + positions % self.page_size
