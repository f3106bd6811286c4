"""The state memory of one engine, and who holds which part of it."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from transformers import Qwen3NextConfig

__all__ = ["KV", "MAMBA", "METADATA", "POISON", "Allocation", "MetadataRow", "OutOfItemsError", "Pool", "StatePools"]

KV, MAMBA, METADATA = "kv", "mamba", "metadata"
"""What pools are addressed with: pages of tokens, a slot a request, a row a request."""

POISON = 0xFF
"""The byte in every item that nobody holds: NaN in a float, -1 in a token id."""

_ROW = {
    "output_ids": (torch.int32, 16),
    "counts": (torch.int32, 16),
    "logprobs": (torch.float32, 16),
    "room": (torch.uint64, 8),
}
"""The buffers of a metadata row: 64 bytes each, the least that some transports move."""


class OutOfItemsError(RuntimeError):
    """A pool has fewer free items than a request needs."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one request holds: pages in the order of its tokens, one slot and one metadata row."""

    pages: tuple[int, ...]
    slot: int
    row: int

    def items(self) -> dict[str, tuple[int, ...]]:
        """Return the ids by what they address."""
        return {KV: self.pages, MAMBA: (self.slot,), METADATA: (self.row,)}


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """What decode has to know about a request besides its state.

    Attributes:
        first_token: The token that prefill sampled.
        first_logprob: Its log-probability.
        tokens: Prompt tokens whose state was computed.
        room: The request's id on both sides.
    """

    first_token: int
    first_logprob: float
    tokens: int
    room: int


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One tensor of state memory.

    Attributes:
        index: What addresses its items: `KV`, `MAMBA` or `METADATA`.
        label: Its name, such as `k.3` (keys of layer 3) or `counts`.
        tensor: The contiguous memory itself, `[items, *item]`.
    """

    index: str
    label: str
    tensor: torch.Tensor

    def raw(self) -> NDArray[np.uint8]:
        """Return the pool's own memory as bytes, `[items, bytes]`; writing to it writes the pool."""
        return self.tensor.view(torch.uint8).view(len(self.tensor), -1).numpy()


class StatePools:
    """All pools of one engine. Memory that nobody holds is poisoned.

    Args:
        config: The model's.
        pages: Pages of the key and value pools; one page id addresses all of them.
        slots: Slots of the linear layers' pools, likewise.
        rows: Metadata rows, likewise.
        seed: Determines the order in which ids are handed out.

    Attributes:
        k: Keys of each full-attention layer, `[pages, page_size, kv_heads, head_dim]` (NHD).
        v: Values of each, likewise.
        conv: Convolution states of each linear layer, `[slots, channels, taps]`.
        recurrent: Recurrent states of each, `[slots, value_heads, key_dim, value_dim]`, in float32: they accumulate.
        rows: The buffers of the metadata rows, `[rows, entries]`; the first entry is used, the rest is zero.
        kv_heads: Heads of keys and values.
        value_heads: Value heads of a linear layer.
        conv_groups: Channels of the convolution: of queries, keys and values.
    """

    page_size = 16

    def __init__(
        self, config: Qwen3NextConfig, *, pages: int = 64, slots: int = 8, rows: int = 8, seed: int = 0
    ) -> None:
        layers = {
            kind: [layer for layer, each in enumerate(config.layer_types or ()) if each == kind]
            for kind in ("full_attention", "linear_attention")
        }
        heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        self.kv_heads, self.value_heads = config.num_key_value_heads, heads
        self.conv_groups = (config.linear_num_key_heads * key, config.linear_num_key_heads * key, heads * value)

        def pools(kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[int, torch.Tensor]:
            return {layer: torch.empty(shape, dtype=dtype) for layer in layers[kind]}

        self.k = pools("full_attention", pages, self.page_size, self.kv_heads, config.head_dim)
        self.v = pools("full_attention", pages, self.page_size, self.kv_heads, config.head_dim)
        # A convolution of n taps reads n - 1 past inputs.
        self.conv = pools("linear_attention", slots, sum(self.conv_groups), config.linear_conv_kernel_dim - 1)
        self.recurrent = pools("linear_attention", slots, heads, key, value, dtype=torch.float32)
        self.rows = {name: torch.empty((rows, width), dtype=dtype) for name, (dtype, width) in _ROW.items()}
        self.all = (
            *(Pool(KV, f"k.{layer}", tensor) for layer, tensor in self.k.items()),
            *(Pool(KV, f"v.{layer}", tensor) for layer, tensor in self.v.items()),
            *(Pool(MAMBA, f"conv.{layer}", tensor) for layer, tensor in self.conv.items()),
            *(Pool(MAMBA, f"recurrent.{layer}", tensor) for layer, tensor in self.recurrent.items()),
            *(Pool(METADATA, name, tensor) for name, tensor in self.rows.items()),
        )
        self._rng = random.Random(seed)
        self._free = {KV: list(range(pages)), MAMBA: list(range(slots)), METADATA: list(range(rows))}
        for pool in self.all:
            pool.raw()[:] = POISON

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> Allocation:
        """Take memory for a request, as a busy engine does: scattered and out of order.

        Raises:
            OutOfItemsError: One of the pools is exhausted; nothing is taken.
        """
        wanted = {KV: self.pages_for(tokens), MAMBA: 1, METADATA: 1}
        for index, count in wanted.items():
            if count > len(self._free[index]):
                raise OutOfItemsError(f"{index}: {count} items needed, {len(self._free[index])} free")
        pages, (slot,), (row,) = (self._take(index, count) for index, count in wanted.items())
        return Allocation(pages, slot, row)

    def _take(self, index: str, count: int) -> tuple[int, ...]:
        free = self._free[index]
        self._rng.shuffle(free)
        return tuple(free.pop() for _ in range(count))

    def release(self, held: Allocation) -> None:
        """Give a request's memory back and poison it. The caller vouches that nothing still moves it.

        Raises:
            ValueError: Some of it is free already; nothing is given back.
        """
        for index, ids in held.items().items():
            if not set(ids).isdisjoint(self._free[index]):
                raise ValueError(f"{index}: {ids} are not all held")
        for index, ids in held.items().items():
            self._free[index].extend(ids)
        for pool in self.all:
            pool.raw()[list(held.items()[pool.index])] = POISON

    def places(self, pages: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Return where the tokens `[start, stop)` of a request are in a page pool seen as a list of tokens."""
        positions = torch.arange(start, stop)
        return torch.tensor(pages)[positions // self.page_size] * self.page_size + positions % self.page_size

    def write_row(self, row: int, content: MetadataRow) -> None:
        """Fill a row in every buffer."""
        values = (content.first_token, content.tokens, content.first_logprob, content.room)
        for buffer, value in zip(self.rows.values(), values, strict=True):
            entries = buffer.numpy()[row]
            entries[:] = 0
            entries[0] = value

    def read_row(self, row: int) -> MetadataRow:
        """Return what a row says, unchecked."""
        token, tokens, logprob, room = (buffer.numpy()[row, 0].item() for buffer in self.rows.values())
        return MetadataRow(token, logprob, tokens, room)

    def digests(self, held: Allocation, tokens: int) -> dict[str, str]:
        """Return a digest of what a request holds of each pool, which two processes can compare without Statelink."""
        found = {}
        for pool in self.all:
            items = pool.raw()[list(held.items()[pool.index])]
            if pool.index == KV:
                items = items.reshape(len(items) * self.page_size, -1)[:tokens]  # the last page's end is no token's
            found[pool.label] = hashlib.blake2b(items.tobytes(), digest_size=8).hexdigest()
        return found
