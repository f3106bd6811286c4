"""Convolution and recurrent states of the linear-attention layers, one slot per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from statelink_demo.layout import PoolLayout

if TYPE_CHECKING:
    from statelink_demo.shape import StateShape

__all__ = ["SlotPool"]


class SlotPool:
    """Two pools per linear layer.

    They are `conv` `[slots, channels, taps]` and `recurrent` `[slots, value_heads, key_dim, value_dim]`.

    Args:
        shape: The model's state.
        slots: Slots of each pool; one slot id addresses all of them.
    """

    def __init__(self, shape: StateShape, *, slots: int) -> None:
        self._heads = shape.value_heads
        self._groups = shape.conv_groups
        self._taps = shape.conv_taps
        conv = (slots, sum(shape.conv_groups), shape.conv_taps)
        recurrent = (slots, shape.value_heads, shape.key_dim, shape.value_dim)
        self.conv = {layer: torch.empty(conv, dtype=shape.dtype) for layer in shape.linear_layers}
        self.recurrent = {layer: torch.empty(recurrent, dtype=shape.recurrent_dtype) for layer in shape.linear_layers}

    def layouts(self) -> tuple[PoolLayout, ...]:
        """Describe the pools: convolution states of all layers, then recurrent states of all layers."""
        conv = tuple(
            PoolLayout(
                component="mamba",
                name="conv",
                layer=layer,
                index="slot",
                tensor=tensor,
                axes=("channel", "tap"),
                groups=self._groups,
            )
            for layer, tensor in self.conv.items()
        )
        recurrent = tuple(
            PoolLayout(
                component="mamba",
                name="recurrent",
                layer=layer,
                index="slot",
                tensor=tensor,
                axes=("head", "key", "value"),
                heads=self._heads,
            )
            for layer, tensor in self.recurrent.items()
        )
        return conv + recurrent

    def write(self, layer: int, slot: int, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        """Store one request's states, `[1, channels, >= taps]` and `[1, heads, key, value]`."""
        self.conv[layer][slot] = conv[0, :, -self._taps :]
        self.recurrent[layer][slot] = recurrent[0]

    def read(self, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of one request's states, each with a leading batch axis of one."""
        return self.conv[layer][slot : slot + 1].clone(), self.recurrent[layer][slot : slot + 1].clone()
