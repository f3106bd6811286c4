"""Statelink over NVIDIA's NIXL.

That is RDMA, NVLink, copies between processes of one host, or TCP, as UCX finds them between two hosts.

Importing this package imports no library; probing it or opening a link does.
"""

from __future__ import annotations

from ._backend import NixlBackend
from ._options import Options

__all__ = ["NixlBackend", "Options"]
