"""The state of one request, as the model's configuration fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import Qwen3NextConfig

__all__ = ["StateShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Which layers hold which state, and how large it is. All counts are of the whole model.

    Attributes:
        attention_layers: Model layer ids with keys and values.
        linear_layers: Model layer ids with a convolution and a recurrent state.
        kv_heads: Key and value heads of a full-attention layer.
        head_dim: Elements of one such head.
        key_heads: Key heads of a linear layer.
        key_dim: Elements of one such key head.
        value_heads: Value heads of a linear layer.
        value_dim: Elements of one such value head.
        conv_kernel: Taps of the causal convolution; one less are kept between calls.
        dtype: Of keys, values and convolution states.
        recurrent_dtype: Of recurrent states, which accumulate and so stay wide.
    """

    attention_layers: tuple[int, ...]
    linear_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_kernel: int
    dtype: torch.dtype = torch.bfloat16
    recurrent_dtype: torch.dtype = torch.float32

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.attention_layers) + len(self.linear_layers)

    @property
    def conv_groups(self) -> tuple[int, int, int]:
        """Widths of the convolution's channel groups `[key, key, value]`, each sharded on its own."""
        key = self.key_heads * self.key_dim
        return key, key, self.value_heads * self.value_dim

    @property
    def conv_taps(self) -> int:
        """Past inputs that the next step of the convolution still reads."""
        return self.conv_kernel - 1

    @classmethod
    def of(cls, config: Qwen3NextConfig) -> StateShape:
        """Read the shape from a model's configuration."""
        kinds = list(enumerate(config.layer_types or ()))
        return cls(
            attention_layers=tuple(layer for layer, kind in kinds if kind == "full_attention"),
            linear_layers=tuple(layer for layer, kind in kinds if kind == "linear_attention"),
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            key_heads=config.linear_num_key_heads,
            key_dim=config.linear_key_head_dim,
            value_heads=config.linear_num_value_heads,
            value_dim=config.linear_value_head_dim,
            conv_kernel=config.linear_conv_kernel_dim,
        )
