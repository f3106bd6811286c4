"""The backend keeps its contract."""

from __future__ import annotations

from tests.helpers.availability import release_of

from statelink.testing import BackendTests


class TestMooncake(BackendTests):
    backend = "mooncake"
    moved_by = f"Mooncake {release_of('mooncake-transfer-engine-non-cuda')} on host memory"
    environment = {"MC_TRANSFER_TIMEOUT": "15"}
    patience = 45.0
