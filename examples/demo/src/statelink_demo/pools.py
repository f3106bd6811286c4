"""The state memory of one engine, and who holds which part of it."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

KV, MAMBA, METADATA = "kv", "mamba", "metadata"
"""What pools are addressed with: pages of tokens, a slot a request, a row a request."""
POISON = 0xFF
"""The byte in every item that nobody holds: NaN in a float, -1 in a token id."""
Held = dict[str, list[int]]
"""The ids that one request holds, by what they address; pages are in the order of its tokens."""
ROW = {"output_ids": torch.int32, "counts": torch.int32, "logprobs": torch.float32, "room": torch.uint64}
"""The buffers of a metadata row: prefill's token, tokens of the prompt, the token's log-probability, the room. Each has
64 bytes, the least that some transports move."""


class Pool(NamedTuple):
    """One tensor ``[items, *item]``: what addresses its items, and a name such as ``k.3`` (keys of layer 3)."""

    by: str
    label: str
    tensor: torch.Tensor

    def raw(self) -> NDArray[np.uint8]:
        """Return the pool's own memory as bytes, ``[items, bytes]``; writing to it writes the pool."""
        return self.tensor.view(torch.uint8).view(len(self.tensor), -1).numpy()


class StatePools:
    """All pools of one engine. Memory that nobody holds is poisoned; ids are handed out in an order that a seed gives.

    Keys `k` and values `v` of a full-attention layer are `[pages, page_size, kv_heads, head_dim]`. Of a linear layer,
    `conv` is `[slots, channels, taps]`, and `recurrent`, which accumulates in float32, `[slots, value_heads, key_dim,
    value_dim]`. Of the buffers of metadata rows, `[slots, entries]`, the first entry is used.
    """

    page_size = 16

    def __init__(self, config: Any, pages: int = 64, slots: int = 8, *, seed: int = 0) -> None:
        heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        self.kv_heads, self.value_heads = config.num_key_value_heads, heads
        keys = config.linear_num_key_heads * key
        self.conv_groups = (keys, keys, heads * value)  # channels of queries, keys and values

        def pools(kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[int, torch.Tensor]:
            layers = [layer for layer, each in enumerate(config.layer_types) if each == kind]
            return {layer: torch.empty(shape, dtype=dtype) for layer in layers}

        self.k = pools("full_attention", pages, self.page_size, self.kv_heads, config.head_dim)
        self.v = pools("full_attention", pages, self.page_size, self.kv_heads, config.head_dim)
        # A convolution of n taps reads n - 1 past inputs.
        self.conv = pools("linear_attention", slots, sum(self.conv_groups), config.linear_conv_kernel_dim - 1)
        self.recurrent = pools("linear_attention", slots, heads, key, value, dtype=torch.float32)
        self.rows = {name: torch.empty((slots, 64 // dtype.itemsize), dtype=dtype) for name, dtype in ROW.items()}
        named = {"k": self.k, "v": self.v, "conv": self.conv, "recurrent": self.recurrent}
        self.all = [
            *(Pool(KV, f"{name}.{at}", each) for name in "kv" for at, each in named[name].items()),
            *(Pool(MAMBA, f"{name}.{at}", each) for name in ("conv", "recurrent") for at, each in named[name].items()),
            *(Pool(METADATA, name, each) for name, each in self.rows.items()),
        ]
        self._rng = random.Random(seed)
        self._free = {KV: list(range(pages)), MAMBA: list(range(slots)), METADATA: list(range(slots))}
        for pool in self.all:
            pool.raw()[:] = POISON

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> Held:
        """Take memory for a request, as a busy engine does: scattered and out of order."""
        for free in self._free.values():
            self._rng.shuffle(free)
        pages = [self._free[KV].pop() for _ in range(self.pages_for(tokens))]
        return {KV: pages, MAMBA: [self._free[MAMBA].pop()], METADATA: [self._free[METADATA].pop()]}

    def release(self, held: Held) -> None:
        """Give a request's memory back and poison it. The caller vouches that nothing still moves it."""
        for by, ids in held.items():
            self._free[by].extend(ids)
        for pool in self.all:
            pool.raw()[held[pool.by]] = POISON

    def places(self, pages: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Return where the tokens `[start, stop)` of a request are in a page pool seen as a list of tokens."""
        positions = torch.arange(start, stop)
        return torch.tensor(pages)[positions // self.page_size] * self.page_size + positions % self.page_size

    def digests(self, held: Held, tokens: int) -> dict[str, str]:
        """Return a digest of what a request holds of each pool, which two processes can compare without Statelink."""
        found = {}
        for pool in self.all:
            items = pool.raw()[held[pool.by]]
            if pool.by == KV:
                items = items.reshape(len(items) * self.page_size, -1)[:tokens]  # the last page's end is no token's
            found[pool.label] = hashlib.blake2b(items.tobytes(), digest_size=8).hexdigest()
        return found
