"""What a peer is told; no library."""

from __future__ import annotations

from statelink.backend.native import Located

__all__ = ["Descriptor"]


class Descriptor(Located, frozen=True, array_like=True):
    """What a peer gets.

    Attributes:
        library: Build and version of Mooncake there; only for error messages.
    """

    BACKEND = "mooncake"
    LIBRARY = "Mooncake"

    library: str
