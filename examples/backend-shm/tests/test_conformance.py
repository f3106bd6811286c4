"""The backend keeps its contract."""

from __future__ import annotations

from statelink.testing import BackendTests


class TestShmBackend(BackendTests):
    backend = "shm"
