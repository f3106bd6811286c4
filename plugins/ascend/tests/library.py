"""Where these tests find MemFabric, the released package: on an NPU, or else over a stand-in for an NPU's driver."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os

import pytest
from plugins.ascend.standin import driver
from tests.helpers.availability import problem_of

__all__ = ["MEMORY", "OPTIONS", "allocator", "environment", "moved_by"]

NIC = os.environ.get("STATELINK_ASCEND_NIC", "")
"""This host's RDMA address, on a machine that has one: the kit then moves host memory, by ``HOST_RDMA``."""
MEMORY = "dram" if NIC else "npu:0"
OPTIONS = {"data_op_type": "HOST_RDMA", "nic": NIC} if NIC else {}


@functools.cache
def environment() -> dict[str, str]:
    """What a process needs in its environment; nothing where there is an NPU.

    Without either, the tests of the calling module are skipped, with the reason. They fail if STATELINK_TEST_REQUIRE
    lists ``ascend``.
    """
    if not problem_of("ascend"):
        return {}
    try:
        return driver.environment()
    except driver.Unbuilt as error:
        problem = f"there is no NPU here, and no stand-in for its driver: {error}"
    if "ascend" in os.environ.get("STATELINK_TEST_REQUIRE", "").split(","):
        raise RuntimeError(problem)
    pytest.skip(problem, allow_module_level=True)


def allocator() -> str:
    """What allocates memory of an NPU: torch on one, as in an engine, and CANN's own calls elsewhere."""
    return "npu_memory:Memory" if environment() else ""


def moved_by() -> str:
    """What moves the bytes, for reports."""
    installed = importlib.util.find_spec("memfabric_hybrid") is not None
    release = importlib.metadata.version("memfabric-hybrid") if installed else "(not installed)"
    return f"MemFabric {release}, over {'a stand-in for the driver of an NPU' if environment() else 'an NPU'}"
