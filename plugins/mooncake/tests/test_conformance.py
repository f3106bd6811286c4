"""The backend keeps its contract."""

from __future__ import annotations

from statelink.backend.native import rdma_devices
from statelink_conformance import BackendTests
from statelink_mooncake import MooncakeBackend

HERE = MooncakeBackend.probe(MooncakeBackend.Options())


class TestMooncake(BackendTests):
    backend = "mooncake"
    moved_by = f"{HERE.details.get('library', 'nothing')}, over {'RDMA' if rdma_devices() else 'TCP'}"
    environment = {"MC_TRANSFER_TIMEOUT": "15"}
    patience = 45.0
