"""Metadata rows: what decode has to know about a request besides its state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from statelink_demo.layout import PoolLayout

__all__ = ["MetadataRow", "RowPool"]

_BUFFERS = {
    "output_ids": (torch.int32, 16),
    "counts": (torch.int32, 16),
    "logprobs": (torch.float32, 16),
    "room": (torch.uint64, 8),
}
"""Every row is 64 bytes, the least that some transports move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRow:
    """The meaning of one row.

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


class RowPool:
    """One buffer per field, `[rows, entries]`; only the first entry of a row is used, the rest is zero.

    Args:
        rows: Rows of each buffer; one row id addresses all of them.
    """

    def __init__(self, *, rows: int) -> None:
        self.buffers = {name: torch.empty((rows, width), dtype=dtype) for name, (dtype, width) in _BUFFERS.items()}

    def layouts(self) -> tuple[PoolLayout, ...]:
        """Describe the buffers."""
        return tuple(
            PoolLayout(component="metadata", name=name, layer=None, index="row", tensor=tensor, axes=("entry",))
            for name, tensor in self.buffers.items()
        )

    def write(self, row: int, content: MetadataRow) -> None:
        """Fill a row in every buffer."""
        fields = {
            "output_ids": content.first_token,
            "counts": content.tokens,
            "logprobs": content.first_logprob,
            "room": content.room,
        }
        for name, value in fields.items():
            entries = self.buffers[name].numpy()[row]
            entries[:] = 0
            entries[0] = value

    def read(self, row: int) -> MetadataRow:
        """Return what a row says, unchecked."""
        entry = {name: buffer.numpy()[row, 0].item() for name, buffer in self.buffers.items()}
        return MetadataRow(
            first_token=entry["output_ids"],
            first_logprob=entry["logprobs"],
            tokens=entry["counts"],
            room=entry["room"],
        )
