"""Statelink over AMD's MoRI: so far, a probe that says what this machine lacks for it.

Neither importing this package nor probing imports MoRI.
"""

from __future__ import annotations

from ._backend import MoriBackend
from ._options import Options

__all__ = ["MoriBackend", "Options"]
