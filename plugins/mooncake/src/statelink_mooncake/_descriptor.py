"""The descriptor. This module needs no library."""

from __future__ import annotations

from statelink.backend.native import Located

__all__ = ["Descriptor"]


class Descriptor(Located, frozen=True, array_like=True):
    """What a peer needs to reach this engine.

    Attributes:
        library: Build and version of Mooncake, for errors.
    """

    BACKEND = "mooncake"
    LIBRARY = "Mooncake"

    library: str
