"""Memory of a device in the kit: what a clause sees of it is what lies at the address that a backend is given."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from statelink._devices import allocate
from statelink.errors import BackendUnavailableError
from statelink.testing._process import ARENA, Worker
from statelink.testing._window import view

if TYPE_CHECKING:
    from statelink.testing._worker import Host

pytest.importorskip("torch")
KIND = "cpu:0"
"""A device that torch reaches everywhere; to the kit it is one like others, of which the host has no pages."""
LAST = ARENA - 40


def look(host: Host, at: int, nbytes: int) -> bytes:
    return ctypes.string_at(host.address + at, nbytes)


def put(host: Host, at: int, data: bytes) -> None:
    ctypes.memmove(host.address + at, data, len(data))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker({}, 60.0, (KIND, ""))
    yield worker
    worker.end()


@pytest.mark.parametrize("at", [0, 4097, LAST])
def test_what_is_written_is_there_and_what_is_there_is_read(worker: Worker, at: int) -> None:
    seen = worker.arena.bytes[at : at + 40]
    assert (worker.memory, len(worker.arena.bytes)) == (KIND, ARENA)
    seen[:] = 7
    assert worker(look, at, 40) == bytes([7] * 40)
    seen[3:6] = np.array([1, 2, 3], np.uint8)
    worker(put, at + 10, b"\xff\xfe")
    expected = np.full(40, 7, np.uint8)
    expected[3:6], expected[10:12] = (1, 2, 3), (255, 254)
    assert np.array_equal(seen, expected)
    assert worker(look, at, 40) == expected.tobytes()
    assert np.array_equal(view(worker.arena.path)[at : at + 40], expected)


def test_it_is_handled_as_an_array(worker: Worker) -> None:
    """Whatever clauses do with an array gives the same with this."""
    rows, model = worker.arena.bytes[64:104].reshape(8, -1), np.zeros((8, 5), np.uint8)
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
    flat, copied = worker.arena.bytes[64:104], rows.copy()
    assert flat[3] == model.ravel()[3]
    flat[:] = 1
    assert np.array_equal(copied, model)


def test_a_process_that_ends_takes_it_along() -> None:
    worker = Worker({}, 60.0, (KIND, ""))
    seen = worker.arena.bytes[:10]
    worker.kill()
    with pytest.raises(ConnectionError, match="the process that holds this memory"):
        seen.copy()
    worker.end()


@pytest.mark.parametrize(
    ("kind", "by", "said"),
    [
        ("granite:0", "", "torch cannot allocate memory of kind 'granite:0' .*granite"),
        ("dram:0", "no_such_module:memory", "no_such_module:memory cannot allocate .*ModuleNotFoundError"),
        ("dram:0", "builtins:memoryview", "builtins:memoryview cannot allocate .*TypeError"),
    ],
)
def test_memory_that_there_is_not(kind: str, by: str, said: str) -> None:
    """A worker without its memory does not stay."""
    with pytest.raises(BackendUnavailableError, match=said.replace(" .*", "(?s:.*)")):
        allocate(kind, 10, by)
    with pytest.raises(BackendUnavailableError):
        Worker({}, 60.0, (kind, by))
