"""Host memory is checked against the process's own map when a link opens, and not before."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.system import System
from tests.pointers.drivers import BASE, host, inventory

import statelink
from statelink import state
from statelink.errors import StateError
from statelink.pointers import Platform, check, read_map

if TYPE_CHECKING:
    from statelink.backend import Backend

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p


class Span:
    """Pages of anonymous memory, which a test protects and unmaps as it likes.

    They lie far below where the kernel looks for room by itself, so that nothing else moves into a hole.
    """

    def __init__(self, pages: int) -> None:
        self.nbytes = pages * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        got = libc.mmap(ctypes.c_void_p(BASE), ctypes.c_size_t(self.nbytes), 3, flags, -1, ctypes.c_long(0))
        assert got not in (None, 2**64 - 1)
        self.address = int(got)
        self._left = set(range(pages))

    def region(self, first: int = 0, nbytes: int | None = None) -> state.Region:
        return state.Region(self.address + first, self.nbytes - first if nbytes is None else nbytes)

    def protect(self, page: int, how: int) -> None:
        assert not libc.mprotect(ctypes.c_void_p(self.address + page * PAGE), ctypes.c_size_t(PAGE), how)

    def unmap(self, *pages: int) -> None:
        for page in pages or tuple(self._left):
            self._left.remove(page)  # another's memory might be there by now
            assert not libc.munmap(ctypes.c_void_p(self.address + page * PAGE), ctypes.c_size_t(PAGE))


@pytest.fixture(name="span")
def span_fixture() -> Iterator[Span]:
    made = Span(6)
    yield made
    made.unmap()


def seeing(maps: str) -> Platform:
    """A process with this map."""
    with System() as system:
        system.texts["/proc/self/maps"] = maps
        return Platform.here()


def looked_at(*regions: state.Region, role: str = "decode") -> None:
    check(inventory(*regions), role=role, platform=Platform.here())


def refused(region: state.Region, role: str = "decode") -> StateError:
    with pytest.raises(StateError) as caught:
        looked_at(region, role=role)
    assert caught.value.code == "state.memory"
    return caught.value


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_link_over_memory_that_was_freed(
    span: Span, role: str, monkeypatch: pytest.MonkeyPatch, broad: type[Backend]
) -> None:
    """It does not open; nothing of it is registered, and nothing stays open."""
    registered: list[Any] = []
    array, fine = host()
    span.unmap(1, 2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(broad, "register", lambda self, regions: registered.append(regions))
        for _ in range(2):
            with pytest.raises(StateError) as caught:
                statelink.open({"role": role, "backend": "tcp"}, inventory(fine, span.region(PAGE, PAGE)))
    assert not registered
    assert caught.value.code == "state.memory"
    assert str(caught.value) == (
        "region 1 is not memory of kind 'dram' as it is described (component rows-1, instance here, rank 0): "
        f"{PAGE} bytes at {span.address + PAGE:#x}: the process's map says that byte 0 of it, "
        f"at {span.address + PAGE:#x}, is not mapped\n"
        "hint: memory must outlive its link: was it freed? Are its address and length right?"
    )
    with statelink.open({"role": role, "backend": "tcp", "inspect": False}, inventory(fine)) as link:
        assert link.snapshot()["memory"] == {
            "dram": {"regions": 1, "bytes": array.nbytes, "checked": "the process's map", "allocated": {}}
        }


@pytest.mark.parametrize("hole", [0, 3, 5])
def test_memory_that_is_there_in_part(span: Span, hole: int) -> None:
    """Before, inside and after a hole all is well; what holds one byte of it is refused, and named."""
    looked_at(span.region(10, span.nbytes - 20))
    span.unmap(hole)
    low, high = hole * PAGE, (hole + 1) * PAGE
    for first, end in ((0, low), (high, span.nbytes)):
        if first < end:
            looked_at(span.region(first, end - first))
            looked_at(span.region(end - 1, 1))
    for first, end in ((0, low + 1), (high - 1, span.nbytes), (0, span.nbytes)):
        error = refused(span.region(first, end - first))
        byte = max(first, low)
        assert f"byte {byte - first} of it, at {span.address + byte:#x}, is not mapped" in error.reason.cause


def test_memory_that_may_only_be_read(span: Span) -> None:
    """Prefill's is read; decode's is written."""
    span.protect(2, mmap.PROT_READ)
    looked_at(span.region(), role="prefill")
    error = refused(span.region())
    assert f"byte {2 * PAGE} of it, at {span.address + 2 * PAGE:#x}, must not be written: r--p" in error.reason.cause
    assert "map it for writing" in error.hint
    looked_at(span.region(0, 2 * PAGE))


def test_a_file_that_is_mapped_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * PAGE))
    array = np.memmap(path, np.uint8, "r")
    error = refused(state.Region(array.ctypes.data, array.nbytes))
    assert f"must not be written: r--s {path}" in error.reason.cause


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_memory_that_may_not_be_touched(span: Span, role: str) -> None:
    """As a guard, or as addresses that a device's driver keeps for itself."""
    span.protect(5, 0)
    error = refused(span.region(), role)
    assert f"byte {5 * PAGE} of it, at {span.address + 5 * PAGE:#x}, must not be read: ---p" in error.reason.cause


def test_all_that_are_wrong_are_counted(span: Span) -> None:
    span.protect(3, mmap.PROT_READ)
    parts = [span.region(PAGE * n, PAGE) for n in range(6)]
    span.unmap(5)
    with pytest.raises(StateError, match=r"region 3 .* must not be written: r--p; so it is with 1 more\n"):
        looked_at(*parts)
    assert refused(parts[5]).reason.who["component"] == "rows-0"


def test_the_end_of_the_address_space() -> None:
    error = refused(state.Region((1 << 64) - 4096, 4096))
    assert "byte 0 of it, at 0xfffffffffffff000, is not mapped" in error.reason.cause


def test_neighbours_of_other_files_are_one_run() -> None:
    """As where an arena grows: what lies across lines of the map is there all the same."""
    lines = "1000-2000 rw-p 00000000 00:00 0 [heap]\n2000-5000 rw-s 00000000 00:01 7    /dev/shm/a b (deleted)\n"
    here = seeing(f"{lines}5000-6000 r--p 00000000 00:00 0\n")
    for region in (state.Region(0x1000, 0x4000), state.Region(0x1FFF, 2)):
        check(inventory(region), role="decode", platform=here)
    check(inventory(state.Region(0x1000, 0x5000)), role="prefill", platform=here)
    for region in (state.Region(0xFFF, 2), state.Region(0x4000, 0x1001), state.Region(0x6000, 1)):
        with pytest.raises(StateError):
            check(inventory(region), role="decode", platform=here)
    assert here.map is not None
    assert here.map.names == ["[heap]", "/dev/shm/a b (deleted)"]


@pytest.mark.parametrize("text", ["", "1000-2000 r--p 00000000 00:00 0\n"])
def test_a_map_of_nothing_writable(text: str) -> None:
    with pytest.raises(StateError):
        check(inventory(state.Region(0x1000, 16)), role="decode", platform=seeing(text))


def test_a_platform_without_a_map(tmp_path: Path) -> None:
    """Nothing is claimed where nothing is known."""
    assert read_map(tmp_path / "maps") is None
    checked = check(inventory(state.Region(1 << 40, 4096)), role="decode", platform=Platform(None))
    assert checked.summary() == {"dram": {"regions": 1, "bytes": 4096, "checked": "", "allocated": {}}}


def test_thousands_of_regions_read_the_map_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, looks = [], []
    here = read_map()
    assert here is not None
    read, reach = Path.read_text, type(here).reach

    def reading(self: Path, *args: Any, **named: Any) -> str:
        if self.name == "maps":
            reads.append(self)
        return read(self, *args, **named)

    def reaching(self: Any, first: Any, *args: Any) -> Any:
        looks.append(len(first))
        return reach(self, first, *args)

    monkeypatch.setattr(Path, "read_text", reading)
    monkeypatch.setattr(type(here), "reach", reaching)
    array = np.zeros((1000, 64), np.uint8)
    rows = {
        f"row-{n}": state.Memory.pointer(row.ctypes.data, (1, 64), "uint8", 1, region=state.Region(row.ctypes.data, 64))
        for n, row in enumerate(array)
    }
    described = state.describe("here", [state.aux_rows(rows)])
    assert len(described.regions) == 1000
    statelink.open({"role": "decode", "backend": "tcp", "inspect": False}, described).close()
    assert (len(reads), looks) == (1, [1000])
