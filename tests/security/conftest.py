"""The links' own fixtures."""

from __future__ import annotations

from tests.link.conftest import _workshops, workshop

__all__ = ["_workshops", "workshop"]
