"""The groups in which the layers of a forward pass are pushed while it runs."""

from __future__ import annotations

from ._items import checked_int

__all__ = ["layer_groups"]

MOST_LAYERS = 1 << 31
DIVIDED = 4
"""The first groups have one in so many of the layers. Each later one has half of what is left."""


def layer_groups(layers: int) -> tuple[int, ...]:
    """After how many layers each group ends: of 32 layers after 8, 16, 24, 28, 30, 31 and 32.

    There are few groups, since each is a push, and the last one is a single layer, since nothing hides it.

    Args:
        layers: The number of layers; without any, there is no group.

    Raises:
        RoomError: That is no number of layers (``room.number``).
    """
    layers = checked_int(layers, "the number of layers", 0, MOST_LAYERS)
    most, done, ends = -(-layers // DIVIDED), 0, list[int]()
    while done < layers:
        done += min(most, max(1, (layers - done) // 2))
        ends.append(done)
    return tuple(ends)
