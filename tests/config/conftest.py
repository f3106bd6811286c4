from __future__ import annotations

from tests.open.conftest import clean

__all__ = ["clean"]
