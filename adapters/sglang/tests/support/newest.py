"""Marks what holds of the engine's newest release alone."""

from __future__ import annotations

import pytest

from statelink_sglang.backend import SEAM

__all__ = ["of_the_newest"]

of_the_newest = pytest.mark.skipif(
    SEAM.release() != SEAM.releases[-1], reason="it compares with a list of what the newest release has"
)
