"""The backend keeps its contract, over the library where it can run, and over its simulator elsewhere.

It moves an NPU's memory by SDMA, or host memory by HOST_RDMA where STATELINK_ASCEND_NIC names the host's RDMA address.
"""

from __future__ import annotations

import os

from tests.helpers.availability import environment_of, options_of

from statelink.testing import BackendTests


class TestAscend(BackendTests):
    backend = "ascend"
    memory = "dram" if "STATELINK_ASCEND_NIC" in os.environ else "npu:0"
    options = options_of(backend, memory)
    environment = environment_of(backend, memory)
    simulator = bool(environment)
    allocator = "npu_memory:Memory" if simulator else ""
