"""Statelink over Mooncake's TransferEngine: batched writes and reads that block, over RDMA or TCP.

Importing this package imports no library. Probing it or opening a link does.
"""

from __future__ import annotations

from ._backend import MooncakeBackend
from ._options import Options

__all__ = ["MooncakeBackend", "Options"]
