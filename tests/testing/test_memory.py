"""Memory of a device in the kit: what a test sees of it is what lies at the address that a backend is given."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.testing.test_kit import HERE

from statelink.errors import BackendUnavailableError
from statelink_conformance import RemoteBackend

if TYPE_CHECKING:
    from statelink.backend import Backend

pytest.importorskip("torch")
KIND = "cpu:0"
"""A device that torch reaches everywhere; to the kit it is one like others, of which the host has no pages."""
SIZE = 1 << 20
LAST = SIZE - 40


def put(backend: Backend, address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def look(backend: Backend, address: int) -> bytes:
    return ctypes.string_at(address, SIZE)


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """The kit's own packages, which have a backend for any memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE / "packages"))
        yield


@pytest.fixture(scope="module")
def holder(importable: None) -> Iterator[RemoteBackend]:
    holder = RemoteBackend("anywhere", "there", [[SIZE]], memory=KIND).open()
    yield holder
    holder.kill()


@pytest.mark.parametrize("at", [0, 4097, LAST])
def test_what_is_written_is_there_and_what_is_there_is_read(holder: RemoteBackend, at: int) -> None:
    seen, address = holder.arrays[0][at : at + 40], holder.regions[0].address
    assert (holder.regions[0].kind, len(holder.arrays[0])) == (KIND, SIZE)
    seen[:] = 7
    assert holder.run(look, address)[at : at + 40] == bytes([7] * 40)
    seen[3:6] = np.array([1, 2, 3], np.uint8)
    holder.run(put, address + at + 10, b"\xff\xfe")
    expected = np.full(40, 7, np.uint8)
    expected[3:6], expected[10:12] = (1, 2, 3), (255, 254)
    assert np.array_equal(seen, expected)
    assert holder.run(look, address)[at : at + 40] == expected.tobytes()


def test_it_is_handled_as_an_array(holder: RemoteBackend) -> None:
    """Whatever clauses do with an array gives the same with this."""
    rows, model = holder.arrays[0][64:104].reshape(8, -1), np.zeros((8, 5), np.uint8)
    picks: list[Any] = [np.array([6, 0, 3]), np.array([], np.int64)]
    for each in (rows, model):
        each[:] = np.arange(40, dtype=np.uint8).reshape(8, 5)
        each[picks[0]] = 9
        each[picks[1]] = 1
        each[1:3] = each[5:7]
        each[7:] = 0
    assert np.array_equal(rows, model)
    assert (rows == model).all()
    assert ((rows == 9) == (model == 9)).all()
    assert np.array_equal(np.flatnonzero(rows != 9), np.flatnonzero(model != 9))
    assert (len(rows), rows.size, rows.shape) == (8, 40, (8, 5))
    assert rows.any()
    assert not rows[7:].any()
    for pick in (*picks, slice(2, 5), np.array([[1], [2]])):
        assert np.array_equal(rows[pick], model[pick])
    flat, copied = holder.arrays[0][64:104], rows.copy()
    assert flat[3] == model.ravel()[3]
    flat[:] = 1
    assert np.array_equal(copied, model)


def test_a_process_that_ends_takes_it_along() -> None:
    holder = RemoteBackend("anywhere", "there", [[SIZE]], memory=KIND)
    seen = holder.arrays[0][:10]
    holder.kill()
    with pytest.raises(ConnectionError, match="the process that holds this memory"):
        np.asarray(seen)


@pytest.mark.parametrize(
    ("kind", "by", "said"),
    [
        ("granite:0", "", "torch cannot allocate memory of kind 'granite:0' .*granite"),
        ("cpu:0", "no_such_module:memory", "no_such_module:memory cannot allocate .*ModuleNotFoundError"),
        ("cpu:0", "builtins:memoryview", "builtins:memoryview cannot allocate .*TypeError"),
    ],
)
def test_memory_that_there_is_not(kind: str, by: str, said: str) -> None:
    """A process without its memory does not stay."""
    with pytest.raises(BackendUnavailableError, match=said.replace(" .*", "(?s:.*)")):
        RemoteBackend("anywhere", "there", [[SIZE]], memory=kind, allocator=by)
