"""Statelink over AMD's MoRI: batched one-sided writes and reads over RDMA or XGMI.

Importing this package imports no library. Probing starts the library in another process, because the library ends its
process if a machine lacks something. Opening a link then starts it in this process.
"""

from __future__ import annotations

from ._backend import MoriBackend
from ._options import Options

__all__ = ["MoriBackend", "Options"]
