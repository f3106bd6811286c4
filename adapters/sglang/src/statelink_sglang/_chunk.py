"""What a forward pass of prefill computes of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Chunk"]


class Chunk:
    """What a forward pass computes of one request.

    Attributes:
        sender: The request's `Sender`.
        start: The first position whose state leaves. It begins a page.
        end: One past the last one.
        pages: Its pages by number, once the copy of them has arrived on the host.
        layers: How many of the model's layers with pages were pushed. The thread of the pushes sets it.
    """

    __slots__ = ("end", "layers", "pages", "sender", "start")

    def __init__(self, sender: Any, start: int, end: int) -> None:
        self.sender, self.start, self.end = sender, start, end
        self.pages: npt.NDArray[Any] | None = None
        self.layers = 0
