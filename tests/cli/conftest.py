from __future__ import annotations

from tests.registry.conftest import bare_path, site

__all__ = ["bare_path", "site"]
