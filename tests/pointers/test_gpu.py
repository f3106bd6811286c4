"""What stand-ins cannot show: a real driver says of real memory what the check expects of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.pointers.drivers import inventory

from statelink import state
from statelink.errors import StateError
from statelink.pointers import Checked, Platform, check

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch reaches no GPU here (torch.cuda.is_available())", allow_module_level=True)

MIB = 1 << 20


def checked(region: state.Region) -> Checked:
    return check(inventory(region), role="decode", platform=Platform.here())


def of(tensor: Any) -> state.Region:
    return state.Memory.of(tensor).region


def test_memory_of_a_gpu() -> None:
    tensor = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda:0")
    found = checked(of(tensor)).summary()["cuda:0"]
    assert found["checked"] in ("the CUDA driver", "HIP")
    assert found["allocated"] in ({"plain": 1}, {"unknown": 1})


def test_kinds_that_it_does_not_have() -> None:
    tensor = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda:0")
    array = np.zeros(MIB, np.uint8)
    pinned = torch.zeros(MIB, dtype=torch.uint8).pin_memory()
    wrong: list[tuple[int, int, str]] = [
        (tensor.data_ptr(), tensor.nbytes, "dram"),
        (tensor.data_ptr(), tensor.nbytes, "cuda:7"),
        (tensor.data_ptr(), 1 << 45, "cuda:0"),
        (array.ctypes.data, array.nbytes, "cuda:0"),
        (pinned.data_ptr(), pinned.nbytes, "cuda:0"),
    ]
    for address, nbytes, kind in wrong:
        with pytest.raises(StateError) as caught:
            checked(state.Region(address, nbytes, kind))
        assert caught.value.code == "state.memory"
    checked(of(pinned))
    checked(of(array))


@pytest.fixture(name="setting")
def setting_fixture() -> Any:
    """Sets torch's allocator; it is as before afterwards."""
    change: Callable[[str], None] = torch.cuda.memory._set_allocator_settings
    yield change
    change("expandable_segments:False")


def test_expandable_segments(setting: Callable[[str], None]) -> None:
    if torch.version.hip:
        pytest.skip("HIP does not say how memory was allocated")
    setting("expandable_segments:True")
    tensor = torch.zeros(96 * MIB, dtype=torch.uint8, device="cuda:0")
    assert checked(of(tensor)).summary()["cuda:0"]["allocated"] == {"virtual": 1}


def test_the_driver_is_not_started_by_asking() -> None:
    """After torch has started it, asking makes no context on another device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensor = torch.zeros(MIB, dtype=torch.uint8, device="cuda:1")
    checked(of(tensor))
    assert torch.cuda.current_device() == 0
