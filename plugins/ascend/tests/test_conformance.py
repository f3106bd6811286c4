"""The backend keeps its contract, over the released library: on an NPU, or over a stand-in for its driver.

It moves an NPU's memory by SDMA, or host memory by HOST_RDMA where STATELINK_ASCEND_NIC names the host's RDMA address.
"""

from __future__ import annotations

from plugins.ascend.tests.library import MEMORY, OPTIONS, allocator, environment, moved_by

from statelink_conformance import BackendTests


class TestAscend(BackendTests):
    backend = "ascend"
    memory = MEMORY
    options = OPTIONS
    environment = environment()
    allocator = allocator()
    moved_by = moved_by()
