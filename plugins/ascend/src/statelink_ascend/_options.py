"""What can be set: nothing yet."""

from __future__ import annotations

import msgspec

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``ascend`` backend. There are none yet: every transport of MemFabric needs the same machine."""
