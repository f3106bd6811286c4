"""The backend keeps its contract, over the library where it can run, and over its simulator elsewhere."""

from __future__ import annotations

from tests.helpers.availability import environment_of

from statelink.testing import BackendTests


class TestAscend(BackendTests):
    backend = "ascend"
    memory = "npu:0"
    environment = environment_of("ascend")
    simulator = bool(environment)
    allocator = "npu_memory:Memory" if simulator else ""
