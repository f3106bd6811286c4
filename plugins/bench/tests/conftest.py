"""What these tests share with those of the workspace."""

from __future__ import annotations

from tests.conftest import backend, no_threads_left

__all__ = ["backend", "no_threads_left"]
