"""Statelink over MemFabric's TransferEngine, for Ascend NPUs.

Importing this package imports no library. Opening a link imports it. A probe imports it in another process.
"""

from __future__ import annotations

from ._backend import AscendBackend
from ._options import Options

__all__ = ["AscendBackend", "Options"]
