"""Statelink over MemFabric's TransferEngine, for Ascend NPUs.

Importing this package imports no library; opening a link does, and a probe has another process do it.
"""

from __future__ import annotations

from ._backend import AscendBackend
from ._options import Options

__all__ = ["AscendBackend", "Options"]
