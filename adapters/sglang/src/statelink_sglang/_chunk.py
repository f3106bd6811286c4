"""What a forward pass of prefill computes of one request, and the groups in which its layers leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Chunk", "group_ends"]

DIVIDED = 4
"""The first groups of a forward pass have one in so many of the layers. Each later one has half of what is left."""


def group_ends(layers: int) -> list[int]:
    """How many layers have left after each group, such as 8, 16, 24, 28, 30, 31, 32 of 32."""
    most, ends, done = -(-layers // DIVIDED), list[int](), 0
    while done < layers:
        done += min(most, max(1, (layers - done) // 2))
        ends.append(done)
    return ends


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
