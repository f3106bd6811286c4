"""The backend keeps its contract."""

from __future__ import annotations

from statelink.testing import BackendTests


class TestMooncake(BackendTests):
    backend = "mooncake"
    environment = {"MC_TRANSFER_TIMEOUT": "15"}
    patience = 45.0
