"""Statelink over AMD's MoRI: batched one-sided writes and reads over RDMA, XGMI or, where the library has it, TCP.

Importing this package imports no library. Probing starts the library in another process, because it ends the process
that it is started in where a machine lacks something; opening a link then starts it in this one.
"""

from __future__ import annotations

from ._backend import MoriBackend
from ._options import Options

__all__ = ["MoriBackend", "Options"]
