"""Gathering and scattering: numpy and torch do the same, on the host and on a device, and touch nothing else."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from statelink.errors import UnsupportedError
from statelink.plan import Places
from statelink.staged._memory import HostMemory, StagingMemory, TorchMemory, staging_memory

torch: Any = pytest.importorskip("torch")


class Pools:
    """Memory to stage, of one device, and what is in it.

    Args:
        how: ``numpy``, or a device by torch's name.
    """

    def __init__(self, how: str) -> None:
        self._device = "cpu" if how == "numpy" else how
        self.staging: StagingMemory = HostMemory(1 << 16) if how == "numpy" else TorchMemory(torch, how, 1 << 16)

    def copy(self, array: npt.NDArray[np.uint8]) -> Any:
        return torch.from_numpy(array.copy()).to(self._device)

    @staticmethod
    def read(tensor: Any) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = tensor.cpu().numpy()
        return found


@pytest.fixture(params=["numpy", "cpu", "cuda:0"])
def pools(request: pytest.FixtureRequest) -> Pools:
    if request.param == "cuda:0" and not torch.cuda.is_available():
        pytest.skip("torch reaches no GPU here (torch.cuda.is_available())")
    return Pools(request.param)


@pytest.mark.parametrize("width", [1, 3, 16, 24, 256])
def test_there_and_back(pools: Pools, width: int) -> None:
    rng = np.random.default_rng(width)
    arrays = [rng.integers(0, 256, (40, width), np.uint8) for _ in range(3)]
    sources = [pools.copy(array) for array in arrays]
    targets = [pools.copy(np.zeros((50, width), np.uint8)) for _ in range(3)]
    if pools.staging.kind != "dram" and torch.cuda.is_available():
        torch.cuda.synchronize()  # as the core waits for the engine's event before it gathers
    addresses = [np.array([tensor.data_ptr() for tensor in tensors], np.uint64) for tensors in (sources, targets)]
    rows, onto = rng.permutation(40)[:30], rng.permutation(50)[:30]
    tiles = [(slice(0, 2), slice(0, 7)), (slice(2, 3), slice(0, 30)), (slice(0, 2), slice(7, 30))]
    at = 128
    for indices, addressed, copy in (
        (rows, addresses[0], pools.staging.pack),
        (onto, addresses[1], pools.staging.unpack),
    ):
        copy([Places(addressed[buffers], indices[some], width) for buffers, some in tiles], at)
    for array, source, target in zip(arrays, sources, targets, strict=True):
        expected = np.zeros((50, width), np.uint8)
        expected[onto] = array[rows]
        np.testing.assert_array_equal(pools.read(target), expected)
        np.testing.assert_array_equal(pools.read(source), array)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(staging_memory("dram", 100), HostMemory)
    with pytest.raises(UnsupportedError, match="memory of kind 'npu:0' cannot be staged"):
        staging_memory("npu:0", 100)
    made: list[Any] = []
    monkeypatch.setattr("statelink.staged._memory.TorchMemory", lambda *told: made.append(told))
    for kind in ("cuda", "cuda:1"):
        staging_memory(kind, 100)
    assert made == [(torch, "cuda", 100), (torch, "cuda:1", 100)]
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(UnsupportedError, match="has not imported torch"):
        staging_memory("cuda:0", 100)
