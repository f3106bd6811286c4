"""Finds the other ranks of a link's own instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._context import Context

__all__ = ["find_siblings"]


def find_siblings(context: Context) -> list[str] | None:
    """Addresses of this instance's other ranks; ``None`` while the rendezvous lacks some. Blocks; data threads only."""
    own = context.rendezvous.resolve(context.inventory.instance)
    return None if own is None else [str(each) for each in own if each != context.channel.endpoint]
