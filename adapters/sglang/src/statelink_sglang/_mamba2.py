"""Finds out which channels of Mamba 2's convolutions a rank has, of which SGLang's pools have only the number.

The channels are x, B and C, one block after the other. x is dealt out by heads. B and C are dealt out by groups; if the
model has one group, every rank has it (``mamba_v2_sharded_weight_loader`` in
``sglang/srt/layers/attention/mamba/mamba.py``). The model's configuration has the number of groups, and the shapes of
the pool have the rest. If the two do not agree, nothing is guessed.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Blocks", "blocks_of_mamba2", "channels_of"]

Blocks = tuple[tuple[int, int], ...]
"""For each block its channels and the heads that share them, in the whole model."""

GROUPS = ("mamba_n_groups", "n_groups")
"""Names under which configurations of models have the number of groups."""


def channels_of(conv: Any, pool: Any) -> int:
    """Channels of a layer's convolution on this rank.

    Args:
        conv: ``[layers, slots, channels, inputs]``, or with the last two in the other order.
        pool: SGLang's pool of such states, which says which order it is.
    """
    return int(conv.shape[2 + getattr(pool, "conv_slice_axis", 0)])


def blocks_of_mamba2(config: Any, pool: Any, width: int) -> Blocks | None:
    """The blocks of a model's convolutions; ``None`` if its configuration and its pool do not say them alike.

    Args:
        config: The model's configuration.
        pool: SGLang's pool of recurrent states.
        width: Ranks of attention TP.
    """
    groups = next((getattr(config, name) for name in GROUPS if isinstance(getattr(config, name, None), int)), 0)
    shape = pool.mamba_cache.temporal.shape
    if len(pool.mamba_cache.conv) != 1 or len(shape) != 5 or groups < 1 or (groups > 1 and groups % width):
        return None
    heads, dim, state = (int(number) for number in shape[2:])
    here = heads * dim + 2 * max(groups // width, 1) * state
    if channels_of(pool.mamba_cache.conv[0], pool) != here:
        return None
    each = groups * state, groups
    return (heads * dim * width, heads * width), each, each
