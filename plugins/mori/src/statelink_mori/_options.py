"""What can be set, and with what effect."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``mori`` backend.

    Attributes:
        transport: The transport whose needs the probe looks for: ``rdma``, ``xgmi`` (GPUs of one node) or ``fabric``
            (GPUs of one UALink domain).
    """

    transport: Literal["rdma", "xgmi", "fabric"] = "rdma"
