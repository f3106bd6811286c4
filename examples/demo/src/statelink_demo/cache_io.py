"""Between the cache of transformers and the pools.

A `DynamicCache` keeps keys and values as `[batch, heads, tokens, dim]` and, for a linear layer, as many
convolution inputs as the kernel has taps. The oldest of them is never read again, so the pools hold one less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen3NextConfig

    from statelink_demo.pools import Allocation, StatePools

__all__ = ["load_cache", "store_layer"]


def store_layer(cache: DynamicCache, layer: int, pools: StatePools, held: Allocation, start: int, stop: int) -> None:
    """Write what one layer computed for tokens `[start, stop)` into the pools."""
    entry: Any = cache.layers[layer]
    if layer in pools.kv.keys:
        pools.kv.write(layer, held.pages, start, entry.keys[:, :, start:stop], entry.values[:, :, start:stop])
    else:
        pools.slots.write(layer, held.slot, entry.conv_states[0], entry.recurrent_states[0])


def load_cache(
    config: Qwen3NextConfig, pools: StatePools, pages: Sequence[int], slot: int, tokens: int
) -> DynamicCache:
    """Build a cache of `tokens` tokens from copies of what the pools hold."""
    cache = DynamicCache(config=config)
    for layer in pools.shape.attention_layers:
        cache.update(*pools.kv.read(layer, pages, tokens), layer)
    for layer in pools.shape.linear_layers:
        conv, recurrent = pools.slots.read(layer, slot)
        # A first update is padded on the left up to the kernel, which restores the one that was left out.
        cache.update_conv_state(conv, layer, conv_kernel_size=pools.shape.conv_kernel)
        cache.update_recurrent_state(recurrent, layer)
    return cache
