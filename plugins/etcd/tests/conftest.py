"""What these tests share with those of the workspace."""

from __future__ import annotations

from tests.conftest import etcd_program, no_threads_left

__all__ = ["etcd_program", "no_threads_left"]
