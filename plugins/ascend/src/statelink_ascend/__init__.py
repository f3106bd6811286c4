"""Statelink over Ascend's MemFabric: so far, a probe that says what this machine lacks for it.

Neither importing this package nor probing imports MemFabric.
"""

from __future__ import annotations

from ._backend import AscendBackend
from ._options import Options

__all__ = ["AscendBackend", "Options"]
