"""What SGLang's pools lack: the whole model's numbers, and the share of it that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["BYTE", "Element", "Geometry", "StateTensor"]


class Element(NamedTuple):
    """An element type: its usual name, and its bytes."""

    name: str
    size: int

    @classmethod
    def of(cls, dtype: Any) -> Element:
        """That of a type of torch."""
        return cls(str(dtype).removeprefix("torch."), dtype.itemsize)


BYTE = Element("uint8", 1)


class StateTensor(NamedTuple):
    """One tensor in which recurrent layers keep a request's state.

    Attributes:
        name: Name, such as ``conv`` or ``ssm``.
        element: Its element type.
        blocks: Blocks of the axis that is shared out, if the pool does not name them: the elements of each in the whole
            model, and the heads or groups in which it is dealt out.
    """

    name: str
    element: Element
    blocks: Sequence[tuple[int, int]] = ()


class Geometry(NamedTuple):
    """The model's numbers, and this rank's shares.

    Attributes:
        layers: Layers of the model, without those of a draft.
        element: Element type of keys, values and latents.
        page: Tokens of a page.
        tp: This rank and the width of attention TP.
        stage: First global layer of this pipeline stage, and one past its last.
        kv_heads: KV heads of the model before any replication; 0 if pages hold latents (MLA).
        window_heads: The same for layers with a sliding window.
        windowed: For each layer of the model, whether it has a sliding window; empty if none has.
        window: Positions that such layers look back; 0 if only the pool says so.
        kind: Kind of the pools' memory, such as ``cuda:0``.
        tensors: Tensors of recurrent layers, in the order of the pool's list.
        request_ratio: Positions of one group of the compressor that keeps its state by request (128 or 2).
        format: Tag of every component. The other side must have the same.
    """

    layers: int
    element: Element
    page: int
    tp: tuple[int, int]
    stage: tuple[int, int]
    kv_heads: int = 0
    window_heads: int = 0
    windowed: Sequence[bool] = ()
    window: int = 0
    kind: str = "dram"
    tensors: Sequence[StateTensor] = ()
    request_ratio: int = 128
    format: str = ""
