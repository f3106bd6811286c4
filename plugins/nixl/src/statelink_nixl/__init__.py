"""Statelink over NVIDIA's NIXL.

NIXL uses RDMA, NVLink, copies between processes of one host, or TCP, depending on what UCX finds.

Importing this package imports no library. Probing it or opening a link does.
"""

from __future__ import annotations

from ._backend import NixlBackend
from ._options import Options

__all__ = ["NixlBackend", "Options"]
