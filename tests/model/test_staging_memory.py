"""Gathering and scattering: numpy and torch do the same, on the host and on a device, and touch nothing else."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from statelink.errors import UnsupportedError
from statelink.plan import Places
from statelink.staged._memory import DeviceRing, HostMemory, StagingMemory, staging_memory

torch: Any = pytest.importorskip("torch")


class Pools:
    """Memory to stage, of one device, and what is in it.

    Args:
        how: ``numpy``, or a device by torch's name.
    """

    def __init__(self, how: str) -> None:
        self._device = "cpu" if how == "numpy" else how
        self.staging: StagingMemory = HostMemory(1 << 16) if how == "numpy" else DeviceRing(how, 1 << 16)

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


@pytest.mark.parametrize("gap", [0, 1 << 12, 5])
def test_arrays_at_equal_distances_take_one_view(monkeypatch: pytest.MonkeyPatch, gap: int) -> None:
    """Those of many layers often lie in one allocation. Others take a view each."""
    rows, width, arrays = 6, 16, 8
    step = rows * width + gap
    whole = np.random.default_rng(gap).integers(0, 256, arrays * step + 64, np.uint8)
    starts = [number * step for number in range(arrays)]
    uneven = [*starts[:4], *(start + 3 for start in starts[4:])]
    views: list[int] = []
    view = DeviceRing._view

    def counted(memory: DeviceRing, array: Any) -> Any:
        views.append(1)
        return view(memory, array)

    monkeypatch.setattr(DeviceRing, "_view", counted)
    chosen = np.array([5, 0, 3])
    for placed, count in ((starts, 1), (uneven, 2)):
        memory = DeviceRing("cpu", 1 << 12)
        tile = Places(np.array([whole.ctypes.data + start for start in placed], np.uint64), chosen, width)
        views.clear()
        memory.pack([tile], 0)
        assert len(views) == count
        packed = np.array(memory._bytes[: arrays * len(chosen) * width].numpy()).reshape(arrays, len(chosen), width)
        expected = [whole[start : start + rows * width].reshape(rows, width)[chosen] for start in placed]
        np.testing.assert_array_equal(packed, expected)


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*told: Any) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("statelink.staged._memory.DeviceRing", refuse)
    with pytest.raises(UnsupportedError, match=r"cannot be staged.*Torch not compiled with CUDA"):
        staging_memory("cuda:0", 100)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(staging_memory("dram", 100), HostMemory)
    with pytest.raises(UnsupportedError, match="memory of kind 'npu:0' cannot be staged"):
        staging_memory("npu:0", 100)
    made: list[Any] = []
    monkeypatch.setattr("statelink.staged._memory.DeviceRing", lambda *told: made.append(told))
    for kind in ("cuda", "cuda:1"):
        staging_memory(kind, 100)
    assert made == [("cuda", 100), ("cuda:1", 100)]
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(UnsupportedError, match="has not imported torch"):
        staging_memory("cuda:0", 100)
