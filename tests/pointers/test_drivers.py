"""Memory of devices is checked against drivers that the process has loaded. The drivers are stand-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.system import System
from tests.pointers.drivers import AMD, BASE, NVIDIA, Piece, cuda, hip, host, inventory, loaded

import statelink
from statelink import state
from statelink.errors import StateError
from statelink.pointers import Checked, Platform, check

if TYPE_CHECKING:
    from statelink.backend import Backend

MIB = 1 << 20


def checked(*regions: state.Region, drivers: list[Any], role: str = "decode") -> Checked:
    with loaded(*drivers):
        return check(inventory(*regions), role=role, platform=Platform.here())


def refusal(*regions: state.Region, drivers: list[Any]) -> StateError:
    with pytest.raises(StateError) as caught:
        checked(*regions, drivers=drivers)
    assert caught.value.code == "state.memory"
    return caught.value


def test_memory_of_the_device_that_is_said() -> None:
    driver = cuda(Piece(BASE, MIB, device=0), Piece(BASE + MIB, MIB, device=1))
    found = checked(state.Region(BASE, MIB, "cuda:0"), state.Region(BASE + MIB + 5, 100, "cuda:1"), drivers=[driver])
    assert found.summary() == {
        f"cuda:{n}": {"regions": 1, "bytes": size, "checked": "the CUDA driver", "allocated": {"plain": 1}}
        for n, size in enumerate((MIB, 100))
    }
    checked(state.Region(BASE + MIB, MIB, "cuda"), drivers=[driver])  # any device


@pytest.mark.parametrize(
    ("pieces", "found", "hint"),
    [
        ((), "the CUDA driver does not know it", "is of kind 'dram'"),
        ((Piece(BASE, MIB, type=1),), "the CUDA driver says that it is host memory", "of kind 'dram'"),
        ((Piece(BASE, MIB, device=2),), "the CUDA driver says that it is memory of device 2", "kind 'cuda:2'"),
        (
            (Piece(BASE, 4096),),
            "the CUDA driver says that byte 4096 of it is memory that it does not know",
            "is its length right?",
        ),
        (
            (Piece(BASE, 4096), Piece(BASE + 4096, MIB, device=1)),
            "the CUDA driver says that byte 4096 of it is memory of device 1",
            "kind 'cuda:1'",
        ),
    ],
)
def test_memory_that_is_not_that_devices(pieces: tuple[Piece, ...], found: str, hint: str) -> None:
    error = refusal(state.Region(BASE, MIB, "cuda:0"), drivers=[cuda(*pieces)])
    who = "(component rows-0, instance here, rank 0)"
    assert str(error).startswith(
        f"region 0 is not memory of kind 'cuda:0' as it is described {who}: {MIB} bytes at {BASE:#x}: {found}\nhint: "
    )
    assert hint in error.hint


@pytest.mark.parametrize("kind", ["dram", "npu:0"])
def test_memory_of_a_device_said_to_be_something_else(kind: str) -> None:
    error = refusal(state.Region(BASE, MIB, kind), drivers=[cuda(Piece(BASE, MIB, device=1))])
    assert f"region 0 is not memory of kind {kind!r}" in str(error)
    assert "the CUDA driver says that it is memory of device 1" in error.reason.cause
    assert "'cuda:1'" in error.hint


def test_a_link_over_them_does_not_open(monkeypatch: pytest.MonkeyPatch, broad: type[Backend]) -> None:
    def registered(*_: Any) -> None:
        raise AssertionError("it was registered")

    array, region = host()
    driver = cuda(Piece(region.address, region.nbytes))
    monkeypatch.setattr(broad, "register", registered)
    for kind, said in (
        ("dram", "memory of device 0"),
        ("cuda:1", "memory of device 0"),
        ("npu:0", "memory of device 0"),
    ):
        with loaded(driver), pytest.raises(StateError, match=f"kind '{kind}' .* {said}"):
            statelink.open({"role": "decode", "backend": "tcp"}, inventory(state.Region(region.address, 4096, kind)))
    assert not array.any()


def test_pinned_and_managed_memory_is_the_hosts_too() -> None:
    for piece in (Piece(0, 0, type=1), Piece(0, 0, attributes={8: 1}), Piece(0, 0, type=1, attributes={8: 1})):
        array, region = host()
        driver = cuda(piece._replace(start=region.address, nbytes=region.nbytes))
        checked(region, drivers=[driver])
        if piece.attributes.get(8):
            checked(state.Region(region.address, region.nbytes, "cuda:0"), drivers=[driver])
        assert not array.any()


@pytest.mark.parametrize("origin", ["virtual", "pool", "plain"])
def test_how_it_was_allocated(origin: str) -> None:
    attributes = {"virtual": {}, "pool": {17: 0xABC}, "plain": {10: 1}}[origin]
    library = cuda(Piece(BASE, MIB, attributes=attributes, virtual=origin == "virtual"))
    found = checked(state.Region(BASE, MIB, "cuda:0"), drivers=[library])
    assert found.summary()["cuda:0"]["allocated"] == {origin: 1}
    assert found.indirect == {"cuda:0"}
    assert not library.held


def test_virtual_memory_is_followed_piece_by_piece() -> None:
    """A driver says of a whole reservation what holds for the piece that is asked for."""
    pieces = [Piece(BASE + n * MIB, MIB, attributes={11: BASE, 12: 64 * MIB}, virtual=True) for n in range(6) if n != 4]
    driver = cuda(*pieces)
    checked(state.Region(BASE, 4 * MIB, "cuda:0"), drivers=[driver])
    error = refusal(state.Region(BASE + 5, 5 * MIB, "cuda:0"), drivers=[driver])
    assert f"byte {4 * MIB - 5} of it is memory that it does not know" in error.reason.cause


def test_a_driver_that_has_not_started_has_no_memory() -> None:
    """Or the process was forked from one that had started it. Host memory is no business of it."""
    _, region = host()
    checked(region, drivers=[cuda(status=3)])
    error = refusal(state.Region(BASE, MIB, "cuda:0"), region, drivers=[cuda(status=3)])
    assert "has not started in this process" in error.reason.cause
    assert "before this process was forked" in error.hint


@pytest.mark.parametrize("status", [4, 201])
def test_a_driver_that_cannot_answer(status: int) -> None:
    """Nothing is claimed."""
    array, region = host()
    found = checked(state.Region(BASE, MIB, "cuda:0"), region, drivers=[cuda(status=status)])
    assert {kind: known["checked"] for kind, known in found.summary().items()} == {
        "cuda:0": "",
        "dram": "the process's map",
    }
    assert not array.any()


def test_a_driver_that_answers_for_some() -> None:
    """It vouches for a kind only if it does for all of its regions."""
    drivers = [cuda(Piece(BASE, 4 * MIB), below=BASE + MIB)]
    regions = state.Region(BASE, 100, "cuda:0"), state.Region(BASE + 2 * MIB, 100, "cuda:0")
    assert checked(*regions, drivers=drivers).summary()["cuda:0"]["checked"] == ""


def test_an_older_driver() -> None:
    """It still tells a device from the host."""
    library = cuda(Piece(BASE, MIB, attributes={}), lacks=["cuMemRetainAllocationHandle", "cuMemRelease"])
    found = checked(state.Region(BASE, MIB, "cuda:0"), drivers=[library])
    assert found.summary()["cuda:0"]["allocated"] == {"unknown": 1}
    with loaded(cuda(lacks=["cuPointerGetAttributes"])):
        assert Platform.here().drivers == ()


def test_hip() -> None:
    library = hip(Piece(BASE, MIB, device=1), Piece(BASE + MIB, MIB, type=1), Piece(BASE + 2 * MIB, MIB, type=3))
    driver = library
    found = checked(state.Region(BASE, MIB, "cuda:1"), drivers=[driver])
    assert found.summary()["cuda:1"]["checked"] == "HIP"
    checked(state.Region(BASE + 2 * MIB, MIB, "cuda:0"), drivers=[driver])
    for region, said in (
        (state.Region(BASE, MIB, "cuda:0"), "HIP says that it is memory of device 1"),
        (state.Region(BASE, MIB, "dram"), "HIP says that it is memory of device 1"),
        (state.Region(BASE + MIB, MIB, "cuda:0"), "HIP says that it is host memory"),
        (state.Region(BASE + 3 * MIB, MIB, "cuda:0"), "HIP does not know it"),
    ):
        assert said in refusal(region, drivers=[driver]).reason.cause
    assert not library.errors  # torch would raise them later


def test_a_hip_that_numbers_memory_otherwise() -> None:
    """Before ROCm 6, 1 was a device's memory and 0 the host's."""
    driver = hip(Piece(BASE, MIB, type=1), version=50_731_921)
    assert checked(state.Region(BASE, MIB, "cuda:0"), drivers=[driver]).summary()["cuda:0"]["checked"] == ""


def test_of_two_drivers_one_knows() -> None:
    drivers = [cuda(), hip(Piece(BASE, MIB))]
    assert checked(state.Region(BASE, MIB, "cuda:0"), drivers=drivers).summary()["cuda:0"]["checked"] == "HIP"
    assert (
        "the CUDA driver does not know it"
        in refusal(state.Region(BASE + MIB, MIB, "cuda:0"), drivers=drivers).reason.cause
    )


def test_which_drivers_are_asked() -> None:
    """Those that are mapped and were started; nothing is loaded."""
    stub = "/usr/lib/libcuda.so.1.stub"
    others = [(name, None) for name in ("[heap]", "/usr/lib/libcudart.so.13", stub, "/dev/nvidiactl")]
    for more, names in (((), ["the CUDA driver"]), ((("/dev/kfd", None),), ["the CUDA driver", "HIP"])):
        with System().load(*others, (NVIDIA, cuda()), (AMD, hip()), *more):
            assert [each.name for each in Platform.here().drivers] == names
    with System().load((NVIDIA, object())):
        assert Platform.here().drivers == ()
