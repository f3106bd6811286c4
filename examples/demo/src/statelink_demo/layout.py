"""What a pool's tensor means: all that a transfer layer has to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["POISON", "PoolLayout"]

POISON = 0xFF
"""The byte in every item that nobody owns: NaN in a float, -1 in a token id."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolLayout:
    """One pool tensor and its meaning.

    Attributes:
        component: The index space it belongs to; all pools of one component are addressed with the same ids.
        name: What it holds: `k`, `v`, `conv`, `recurrent`, or the name of a metadata buffer.
        layer: Model layer id, or None where the pool belongs to no layer.
        index: What axis 0 counts.
        tensor: The contiguous memory itself, `[items, *item]`.
        axes: Names of the axes of one item.
        heads: Heads of the whole model along the `head` axis; None without such an axis.
        groups: Widths of the independently sharded groups along the `channel` axis; empty elsewhere.
        tokens_per_item: Tokens that one item holds; None where an item belongs to a request as a whole.
    """

    component: Literal["kv", "mamba", "metadata"]
    name: str
    layer: int | None
    index: Literal["page", "slot", "row"]
    tensor: torch.Tensor
    axes: tuple[str, ...]
    heads: int | None = None
    groups: tuple[int, ...] = ()
    tokens_per_item: int | None = None

    @property
    def items(self) -> int:
        """Number of items that an id can address."""
        return int(self.tensor.shape[0])

    @property
    def item_nbytes(self) -> int:
        """Bytes of one item, which is also the stride between items."""
        return int(self.tensor.stride(0)) * self.tensor.element_size()

    def raw(self) -> NDArray[np.uint8]:
        """Return the pool's own memory as bytes, `[items, item_nbytes]`; writing to it writes the pool."""
        return self.tensor.view(torch.uint8).view(self.items, self.item_nbytes).numpy()

    def poison(self, ids: tuple[int, ...] | None = None) -> None:
        """Overwrite the given items, or all, so that a stale read shows."""
        self.raw()[slice(None) if ids is None else list(ids)] = POISON
