"""How threads come to use the device of a link's memory, and how peers' writes become visible to it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.pointers.drivers import BASE, Piece, cuda, hip

from statelink.errors import TransferError
from statelink.pointers import Checked, Platform
from statelink.pointers._cuda import Cuda
from statelink.pointers._hip import Hip

if TYPE_CHECKING:
    from collections.abc import Callable


class Reading:
    """A driver that only reads."""

    @staticmethod
    def reader(device: int) -> str:
        return f"reader {device}"


def number(given: Any) -> int:
    return int(given.value)


def nvidia(calls: list[str], ordering: int = 0, options: int = 1, fails: str = "") -> Cuda:
    """A driver that writes down what changes something."""
    library = cuda(Piece(BASE, 1 << 20, device=1))

    def said(name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            calls.append(name)
            return 700 if name == fails else 0

        return call

    def attribute(place: Any, which: Any, _: Any) -> int:
        place._obj.value = {117: options, 118: ordering}[number(which)]
        return 0

    for name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxPushCurrent_v2"):
        setattr(library, name, said(name))
    for name in ("cuCtxPopCurrent_v2", "cuFlushGPUDirectRDMAWrites"):
        setattr(library, name, said(name))
    library.cuDeviceGetAttribute = attribute
    return Cuda(library)


def amd(calls: list[tuple[Any, ...]], status: int = 0) -> Hip:
    library = hip(Piece(BASE, 1 << 20, device=1))

    def choose(device: Any) -> int:
        calls.append(("device", number(device)))
        return status

    def wait() -> int:
        calls.append(("wait",))
        return status

    library.hipSetDevice, library.hipDeviceSynchronize = choose, wait
    return Hip(library)


def checked(*devices: tuple[Any, int]) -> Checked:
    return Checked(Platform(None), (), {}, {}, frozenset(), frozenset(devices))


def test_a_thread_uses_the_one_device_of_the_memory() -> None:
    calls: list[str] = []
    bind = checked((nvidia(calls), 1)).binding()
    assert calls == ["cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    bind()
    assert calls[2:] == ["cuCtxSetCurrent"]


def test_with_several_devices_or_none_a_thread_prefers_none() -> None:
    calls: list[str] = []
    driver = nvidia(calls)
    for each in (checked(), checked((driver, 0), (driver, 1))):
        each.binding()()
    assert calls == []


@pytest.mark.parametrize("fails", ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_a_driver_that_refuses_ends_no_thread(caplog: pytest.LogCaptureFixture, fails: str) -> None:
    with caplog.at_level(logging.WARNING, "statelink"):
        checked((nvidia([], fails=fails), 1)).binding()()
    assert "device 1: CUDA error 700" in caplog.text


def test_rocm() -> None:
    calls: list[tuple[Any, ...]] = []
    memory = checked((amd(calls), 1))
    memory.binding()()
    assert calls == [("device", 1)]
    flush = memory.flushing()
    assert flush is not None
    flush()
    assert calls[1:] == [("device", 1), ("wait",)]
    assert memory.readers() == {}


def test_errors_of_rocm(caplog: pytest.LogCaptureFixture) -> None:
    memory = checked((amd([], status=719), 1))
    with caplog.at_level(logging.WARNING, "statelink"):
        memory.binding()()
    assert "device 1: HIP error 719" in caplog.text
    flush = memory.flushing()
    assert flush is not None
    with pytest.raises(TransferError, match=r"could not be flushed.*HIP error 719"):
        flush()


def test_a_flush_leaves_the_threads_context_as_it_was() -> None:
    calls: list[str] = []
    flush = checked((nvidia(calls), 1)).flushing()
    assert flush is not None
    calls.clear()
    flush()
    assert calls == ["cuCtxPushCurrent_v2", "cuFlushGPUDirectRDMAWrites", "cuCtxPopCurrent_v2"]


@pytest.mark.parametrize(("ordering", "options", "warned"), [(100, 1, False), (200, 1, False), (0, 2, True)])
def test_where_nothing_is_flushed(caplog: pytest.LogCaptureFixture, ordering: int, options: int, warned: bool) -> None:
    """The device orders writes itself; or the host cannot flush them, which is said."""
    with caplog.at_level(logging.WARNING, "statelink"):
        assert checked((nvidia([], ordering, options), 1)).flushing() is None
    assert ("the host cannot flush them" in caplog.text) is warned


def test_a_flush_that_fails() -> None:
    flush = checked((nvidia([], fails="cuFlushGPUDirectRDMAWrites"), 1)).flushing()
    assert flush is not None
    with pytest.raises(TransferError, match=r"could not be flushed.*CUDA error 700"):
        flush()


def test_each_device_is_flushed() -> None:
    calls: list[str] = []
    driver = nvidia(calls)
    flush = checked((driver, 0), (driver, 1)).flushing()
    assert flush is not None
    calls.clear()
    flush()
    assert calls.count("cuFlushGPUDirectRDMAWrites") == 2


def test_memory_is_read_by_its_kind() -> None:
    driver = Reading()
    found: dict[str, Any] = dict(checked((driver, 1)).readers())
    assert found == {"cuda:1": "reader 1", "cuda": "reader 1"}
    assert set(checked((driver, 0), (driver, 1)).readers()) == {"cuda:0", "cuda:1"}
