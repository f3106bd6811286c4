"""Gathering and scattering: numpy and torch do the same, and touch nothing else."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from statelink.errors import UnsupportedError
from statelink.plan import Places
from statelink.staged._memory import HostMemory, StagingMemory, TorchMemory, staging_memory

torch: Any = pytest.importorskip("torch")


@pytest.fixture(params=["numpy", "torch"])
def memory(request: pytest.FixtureRequest) -> StagingMemory:
    made: StagingMemory = HostMemory(1 << 16) if request.param == "numpy" else TorchMemory(torch, "cpu", 1 << 16)
    return made


@pytest.mark.parametrize("width", [1, 3, 16, 24, 256])
def test_there_and_back(memory: StagingMemory, width: int) -> None:
    rng = np.random.default_rng(width)
    pools = [rng.integers(0, 256, (40, width), np.uint8) for _ in range(3)]
    others = [np.zeros((50, width), np.uint8) for _ in range(3)]
    addresses = [np.array([array.ctypes.data for array in arrays], np.uint64) for arrays in (pools, others)]
    rows, onto = rng.permutation(40)[:30], rng.permutation(50)[:30]
    tiles = [(slice(0, 2), slice(0, 7)), (slice(2, 3), slice(0, 30)), (slice(0, 2), slice(7, 30))]
    at = 128
    for indices, addressed, copy in ((rows, addresses[0], memory.pack), (onto, addresses[1], memory.unpack)):
        copy([Places(addressed[buffers], indices[some], width) for buffers, some in tiles], at)
    for array, other in zip(pools, others, strict=True):
        expected = np.zeros_like(other)
        expected[onto] = array[rows]
        np.testing.assert_array_equal(other, expected)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(staging_memory("dram", 100), HostMemory)
    with pytest.raises(UnsupportedError, match="memory of kind 'npu:0' cannot be staged"):
        staging_memory("npu:0", 100)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(UnsupportedError, match="has not imported torch"):
        staging_memory("cuda:0", 100)
