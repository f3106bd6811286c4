"""The backend keeps its contract, over the released library: on an NPU, or over a stand-in for its driver.

It moves an NPU's memory by SDMA, or host memory by HOST_RDMA where STATELINK_ASCEND_NIC names the host's RDMA address.
"""

from __future__ import annotations

from typing import ClassVar

from plugins.ascend.tests.library import MEMORY, OPTIONS, allocator, environment, moved_by

from statelink_conformance import BackendTests


class TestAscend(BackendTests):
    backend = "ascend"
    memory = MEMORY
    options = OPTIONS
    environment = environment()
    allocator = allocator()
    moved_by = moved_by()
    deviations: ClassVar = {
        "test_closing_leaves_nothing_to_a_peer_that_stays": "the engine of a closed link stays until the next link "
        "opens, since the library crashes the process if a peer leaves while it destroys one"
    }
