"""Where a library refuses memory because of how it was allocated, the error names the setting to change."""

from __future__ import annotations

import logging
import mmap
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.system import System
from tests.pointers.drivers import BASE, Piece, cuda, host, inventory, loaded

import statelink
from statelink import state
from statelink.errors import BackendUnavailableError, StatelinkError, TransferError, UnsupportedError
from statelink.pointers import Platform, check, hint_at_settings, lockable, pinned, segments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from statelink.backend import Backend

ADVICE = "which many libraries cannot register, or move slowly: set"


def failed(region: state.Region, error: Exception | None = None) -> StatelinkError:
    """What is said where a backend refuses the memory."""
    checked = check(inventory(region), role="prefill", platform=Platform.here())
    with pytest.raises(StatelinkError) as caught, hint_at_settings(checked, backend="tcp"):
        raise error or TransferError("no", cause="ibv_reg_mr: Bad address", hint="ask the library", backend="tcp")
    return caught.value


@pytest.fixture(autouse=True)
def no_driver() -> Iterator[None]:
    """No driver is loaded, whatever other tests have started: a real one knows that this memory is the host's."""
    with loaded():
        yield


@pytest.fixture(autouse=True)
def any_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)


@pytest.mark.parametrize(
    ("variable", "value", "kind", "advice"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "cuda:0", "expandable_segments:False"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:true", "cuda:0", "expandable_segments:False"),
        ("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True", "cuda:1", "expandable_segments:False"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "npu:0", "expandable_segments:False"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "cuda:0", "backend:native"),
    ],
)
def test_the_environment_says_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kind: str, advice: str
) -> None:
    array, region = host()
    region = state.Region(region.address, region.nbytes, kind)
    assert failed(region).hint == "ask the library"
    monkeypatch.setenv(variable, value)
    error = failed(region)
    assert error.hint.startswith(f"ask the library; memory of {kind} is allocated ")
    assert error.hint.endswith(f", {ADVICE} {advice} in {variable}")
    # Nothing of what the backend said is lost.
    assert (type(error), error.code) == (TransferError, "backend.transfer")
    assert str(error).startswith("no (backend tcp): ibv_reg_mr: Bad address\nhint: ask the library; ")
    assert not array.any()


@pytest.mark.parametrize("call", ["register", "descriptor"])
def test_a_link_whose_backend_refuses(monkeypatch: pytest.MonkeyPatch, broad: type[Backend], call: str) -> None:
    """Whichever backend, and in whichever call its library finds out."""

    def refusing(*_: Any) -> None:
        raise TransferError("no", cause="ibv_reg_mr: Bad address", backend="tcp")

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(broad, "register", lambda *_: None)
    monkeypatch.setattr(broad, call, refusing)
    array, region = host()
    region = state.Region(region.address, region.nbytes, "cuda:0")
    with pytest.raises(TransferError) as caught:
        statelink.open({"role": "decode", "backend": "tcp"}, inventory(region))
    assert caught.value.hint.endswith(f"{ADVICE} expandable_segments:False in PYTORCH_CUDA_ALLOC_CONF")
    assert not array.any()


@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", "cuda:0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "dram"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "npu:0"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "cuda:0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "garbage,expandable_segments,:,backend:native", "cuda:0"),
    ],
)
def test_the_environment_says_something_else(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kind: str
) -> None:
    monkeypatch.setenv(variable, value)
    array, region = host()
    error = failed(state.Region(region.address, region.nbytes, kind))
    assert error.hint == "ask the library"
    assert not array.any()


SEGMENTED = "memory of cuda:0 is allocated in expandable segments"
POOLED = "memory of cuda:0 is allocated from a pool (cudaMallocAsync)"


@pytest.mark.parametrize(
    ("piece", "setting", "found"),
    [
        (
            Piece(BASE, 4096, attributes={15: 1}, virtual=True),
            "",
            f"{SEGMENTED}, {ADVICE} expandable_segments:False in ",
        ),
        (Piece(BASE, 4096, attributes={17: 9}), "", f"{POOLED}, {ADVICE} backend:native in PYTORCH_CUDA_ALLOC_CONF"),
        # The driver knows better than the environment: an engine may use another allocator for its pools.
        (Piece(BASE, 4096), "expandable_segments:True", ""),
        (Piece(BASE, 4096, attributes={17: 9}), "expandable_segments:True", f"{POOLED}, {ADVICE} backend:native"),
        (Piece(BASE, 4096, attributes={10: 1}), "", "no network card can reach memory of cuda:0"),
    ],
)
def test_the_driver_says_it(monkeypatch: pytest.MonkeyPatch, piece: Piece, setting: str, found: str) -> None:
    if setting:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with loaded(cuda(piece)):
        error = failed(state.Region(BASE, 4096, "cuda:0"))
    assert found in error.hint
    assert (error.hint == "ask the library") is (not found)


def test_it_is_said_when_the_link_opens(
    monkeypatch: pytest.MonkeyPatch, broad: type[Backend], caplog: pytest.LogCaptureFixture
) -> None:
    """Some libraries register such memory, and move it slowly: no error would ever say so."""
    monkeypatch.setattr(broad, "register", lambda *_: None)
    piece = Piece(BASE, 4096, attributes={15: 1}, virtual=True)
    for driver, number in ((cuda(piece), 1), (cuda(Piece(BASE, 4096)), 0)):
        with loaded(driver), caplog.at_level(logging.WARNING, "statelink.open"):
            caplog.clear()
            region = state.Region(BASE, 4096, "cuda:0")
            with statelink.open({"role": "decode", "backend": "tcp", "inspect": False}, inventory(region)) as link:
                allocated = link.snapshot()["memory"]["cuda:0"]["allocated"]
        said = [each.getMessage() for each in caplog.records]
        assert len(said) == number
        assert all(text.startswith(f"rank 0 of here: {SEGMENTED}") for text in said)
        assert allocated == {"virtual" if number else "plain": 1}


def test_what_is_not_statelinks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    array, region = host()
    cause = RuntimeError("Bad address [14]")
    error = failed(state.Region(region.address, 4096, "cuda:0"), cause)
    assert isinstance(error, TransferError)
    assert error.__cause__ is cause
    assert str(error).startswith("memory could not be registered (backend tcp): RuntimeError: Bad address [14]\nhint: ")
    assert "in PYTORCH_CUDA_ALLOC_CONF" in error.hint
    assert not array.any()


def test_what_has_nothing_to_do_with_it(monkeypatch: pytest.MonkeyPatch, broad: type[Backend]) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    array, region = host()
    region = state.Region(region.address, 4096, "cuda:0")
    assert failed(region, UnsupportedError("not declared")).hint == ""
    with monkeypatch.context() as patch:
        patch.setattr(broad, "__init__", _unavailable)
        with pytest.raises(BackendUnavailableError) as caught:
            statelink.open({"role": "decode", "backend": "tcp"}, inventory(region))
        assert caught.value.hint == ""
    assert not array.any()


def _unavailable(*_: Any) -> None:
    raise BackendUnavailableError("no device")


def test_less_memory_may_be_locked_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    array, region = host(1 << 20)
    for most, said in ((1 << 20, False), ((1 << 20) - 1, True), (-1, False), (0, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, most=most: (most, most))
        with System() as system:
            system.texts["/proc/self/status"] = "CapEff:\t0000000000000000\n"
            error = failed(region)
        assert ("RLIMIT_MEMLOCK" in error.hint) is said
        if said:
            assert f"may lock {most >> 10} KiB (RLIMIT_MEMLOCK) and 1024 KiB are to be registered" in error.hint
            assert "ulimit -l unlimited" in error.hint
    assert not array.any()


def test_the_limit_on_locked_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 8192))
    assert lockable(status) == 4096
    for mask, most in (("0000000000000000", 4096), ("0000000000004000", -1), ("000001ffffffbfff", 4096)):
        status.write_text(f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{mask}\n")
        assert lockable(status) == most
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert lockable(status) == -1


def test_memory_that_is_pinned(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert pinned(status) == 0
    status.write_text("VmLck:\t       8 kB\nVmPin:\t      64 kB\n")
    assert pinned(status) == 64 << 10
    assert pinned() >= 0


@pytest.mark.parametrize("kind", ["ext4", "hugetlbfs"])
def test_memory_that_is_mapped_in_a_way_that_libraries_refuse(tmp_path: Path, kind: str) -> None:
    """Pages of files on disks cannot be locked; those of a file system in memory can, wherever it is mounted."""
    path = tmp_path / "pool"
    path.write_bytes(bytes(8192))
    mounts = f"overlay / overlay rw 0 0\nnone {tmp_path} {kind} rw 0 0\n"
    shared, copied = np.memmap(path, np.uint8, "r+"), np.memmap(path, np.uint8, "c")
    only_read = np.memmap(path, np.uint8, "r")
    with mmap.mmap(-1, 8192) as anonymous:
        unnamed = np.frombuffer(anonymous, np.uint8)
        for array, said in (
            (shared, f"mapped from {path}" if kind == "ext4" else ""),
            (only_read, f"for reading only (r--s {path})"),
            (copied, ""),
            (unnamed, ""),
        ):
            with System() as system:
                system.texts["/proc/self/mounts"] = mounts
                error = failed(state.Region(array.ctypes.data, 8192))
            assert said in error.hint
            assert (error.hint == "ask the library") is (not said)
        del unnamed, array


def test_which_families_are_told_to_use_segments() -> None:
    assert segments({}) == {}
    assert segments({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) == {
        "cuda": "PYTORCH_ALLOC_CONF",
        "npu": "PYTORCH_ALLOC_CONF",
    }
    assert segments({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}) == {"npu": "PYTORCH_NPU_ALLOC_CONF"}
