"""Whether the engine is the newest release: some tests compare with lists of what that one has."""

from __future__ import annotations

from statelink_vllm.connector import SEAM

__all__ = ["OLDER", "WHY"]

OLDER = SEAM.release() != SEAM.releases[-1]
WHY = "it compares with a list of what the newest release has"
