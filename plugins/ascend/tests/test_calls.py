"""What the backend asks of the library and makes of its answers, with a library that answers anything."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from statelink.backend import UNKNOWN, BackendContext, Batch, Blocks, Region
from statelink.errors import BackendUnavailableError, TransferError
from statelink_ascend import AscendBackend, Options


class Library:
    """A library that writes down how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}
        self.port = 9999
        self.TransDataOpType = SimpleNamespace(SDMA="sdma", HOST_RDMA="host_rdma")
        self.TransferEngine = self

    def __call__(self) -> Library:
        return self

    def get_rpc_port(self) -> int:
        return self.port

    def get_and_clear_last_err_msg(self) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.codes.get(name, 0)

        call.__name__ = name
        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", found)
    return found


@pytest.fixture
def make(library: Library) -> Iterator[Callable[..., AscendBackend]]:
    made: list[AscendBackend] = []

    def make(role: str = "decode", host: str = "127.0.0.1", **options: Any) -> AscendBackend:
        made.append(AscendBackend(BackendContext(options=Options(**options), link="here", host=host, role=role)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


THERE = msgspec.msgpack.encode([1, "there", "::1", 9000, "Prefill", "SDMA", 0])
"""The descriptor of a prefill."""
REGIONS = (Region(4096, 10, "npu:0"), Region(1 << 40, 1 << 30, "npu:0"), Region((1 << 64) - 4096, 4096, "npu:0"))


def test_the_start(make: Callable[..., AscendBackend], library: Library) -> None:
    make("prefill", "::1")
    assert library.calls == [("initialize", "tcp://127.0.0.1:0", "[::1]:0", "Prefill", 0, "sdma", "Decode", "")]


def test_host_memory_over_rdma(make: Callable[..., AscendBackend], library: Library) -> None:
    """What is asked for; nothing here moves bytes by it."""
    nic = "tcp://192.0.2.1:10002"
    backend = make("prefill", data_op_type="HOST_RDMA", nic=nic)
    backend.register((Region(4096, 10, "dram"), Region(1 << 40, 20, "npu:0")))
    assert library.calls == [
        ("initialize", "tcp://127.0.0.1:0", "127.0.0.1:0", "Prefill", 0, "host_rdma", "Decode", nic),
        ("batch_register_memory", [4096, 1 << 40], [10, 20]),
    ]


@pytest.mark.parametrize("code", [-1, 7])
def test_a_start_that_fails_and_says_so_with_any_number(
    make: Callable[..., AscendBackend], library: Library, code: int
) -> None:
    library.codes["initialize"] = code
    with pytest.raises(BackendUnavailableError, match=f"could not be started .*initialize returned {code}"):
        make()
    assert library.calls[1:] == [("destroy",), ("unInitialize",)]
    library.codes.clear()
    make()


@pytest.mark.parametrize(
    ("role", "host", "cause"),
    [
        ("prefill", "localhost", "does not appear to be an IPv4 or IPv6 address"),  # it would fail when it connects
        ("decode", "localhost", "does not appear to be an IPv4 or IPv6 address"),
        ("prefill", "0.0.0.0", "peers cannot reach it"),
        ("decode", "192.0.2.1", "assign requested address"),  # it would look for a port for a minute
    ],
)
def test_an_address_that_is_none_of_ours(
    make: Callable[..., AscendBackend], library: Library, role: str, host: str, cause: str
) -> None:
    with pytest.raises(BackendUnavailableError, match=rf"MemFabric cannot listen at '{host}' .*: .*{cause}"):
        make(role, host)
    assert library.calls == []
    make(role)


def test_all_regions_are_registered_at_once(make: Callable[..., AscendBackend], library: Library) -> None:
    """So that the library merges those that share a page."""
    make().register(REGIONS)
    addresses, sizes = [4096, 1 << 40, (1 << 64) - 4096], [10, 1 << 30, 4096]
    assert library.calls[1:] == [("batch_register_memory", addresses, sizes)]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("cuda:0", "does not know such memory"),
        ("dram", "host memory needs HOST_RDMA"),
        ("npu:1", "the engine runs on device_id 0"),
    ],
)
def test_memory_that_it_cannot_register(
    make: Callable[..., AscendBackend], library: Library, kind: str, cause: str
) -> None:
    with pytest.raises(
        TransferError, match=f"region 1 could not be registered .*10 bytes of {kind} at 0x1000: .*{cause}"
    ):
        make().register((REGIONS[1], Region(4096, 10, kind)))
    assert len(library.calls) == 1


def test_nothing_to_register(make: Callable[..., AscendBackend], library: Library) -> None:
    make().register(())
    assert len(library.calls) == 1


@pytest.mark.parametrize("code", [-1, -2000, 7])
def test_a_registration_that_fails_with_any_number(
    make: Callable[..., AscendBackend], library: Library, code: int
) -> None:
    library.codes["batch_register_memory"] = code
    with pytest.raises(TransferError, match=f"region 0 could not be .*batch_register_memory returned {code}"):
        make().register(REGIONS)


@pytest.mark.parametrize("code", [-1, -2014, -3003, 7])
def test_a_transfer_that_fails_with_any_number(make: Callable[..., AscendBackend], library: Library, code: int) -> None:
    """Whether it has stopped nobody knows."""
    backend = make()
    backend.register(REGIONS)
    backend.connect("there", THERE, (Region(1 << 41, 100, "npu:0"),))
    here, there = np.array([1 << 40], np.uint64), np.array([1 << 41], np.uint64)
    one, zero = np.ones(1, np.uint32), np.zeros(1, np.uint32)
    library.codes["batch_transfer_sync_write"] = code
    outcome = backend.submit("there", Batch(Blocks(here, there, one.astype(np.uint64), one, zero), 1, 1)).outcome
    assert library.calls[-1] == ("batch_transfer_sync_write", "[::1]:9000", [1 << 40], [1 << 41], [1])
    assert outcome is not None
    assert (outcome.ok, outcome.settled) == (False, False)
    assert f"batch_transfer_sync_write returned {code}" in outcome.reason


def test_calls_that_raise(make: Callable[..., AscendBackend], library: Library) -> None:
    """What it raises becomes an error of ours, with its text; what became of a batch is not known then."""
    backend = make()
    library.__dict__["batch_register_memory"] = refuses = Refuses()
    with pytest.raises(TransferError, match=r"region 0 could not be .* raised RuntimeError: std::bad_alloc"):
        backend.register(REGIONS)
    del library.__dict__["batch_register_memory"]
    backend.register(REGIONS)
    backend.connect(
        "there",
        THERE,
        (Region(1 << 41, 100, "npu:0"),),
    )
    assert (backend.transport("there"), backend.transport("nobody")) == ("sdma", UNKNOWN)
    library.__dict__["batch_transfer_sync_write"] = refuses
    one, zero = np.ones(1, np.uint64), np.zeros(1, np.uint32)
    blocks = Blocks(one << np.uint64(40), one << np.uint64(41), one, zero + np.uint32(1), zero)
    outcome = backend.submit("there", Batch(blocks, 1, 1)).outcome
    assert outcome == (False, "MemFabric's refuses raised RuntimeError: std::bad_alloc, for 1 blocks", False)


class Refuses:
    """A function that raises as the bindings do."""

    __name__ = "refuses"

    def __call__(self, *_: object) -> int:
        raise RuntimeError("std::bad_alloc")


def test_a_start_that_raises_is_undone(make: Callable[..., AscendBackend], library: Library) -> None:
    """Another link of the process can start then."""
    library.__dict__["get_rpc_port"] = Refuses()
    with pytest.raises(BackendUnavailableError, match=r"could not be started .*RuntimeError: std::bad_alloc"):
        make()
    assert library.calls[1:] == [("destroy",), ("unInitialize",)]
    del library.__dict__["get_rpc_port"]
    make()


def test_an_end_that_raises_is_an_end(make: Callable[..., AscendBackend], library: Library) -> None:
    library.codes["initialize"] = -1
    library.__dict__["destroy"] = Refuses()
    with pytest.raises(BackendUnavailableError, match="could not be started"):
        make()
    assert library.calls[-1] == ("unInitialize",)
    library.codes.clear()
    make()


@pytest.mark.parametrize("code", [0, -1])
def test_a_closed_link_leaves_its_engine_until_the_next_one_opens(
    make: Callable[..., AscendBackend], library: Library, code: int
) -> None:
    """The library crashes the process if a peer leaves while it destroys an engine. One that failed to move stays."""
    backend = make("decode")  # which makes no first contact
    backend.register(REGIONS)
    backend.connect("there", THERE, REGIONS)
    library.codes["batch_transfer_sync_write"] = code
    one, zero = np.ones(1, np.uint64), np.zeros(1, np.uint32)
    address = np.array([REGIONS[1].address], np.uint64)
    transfer = backend.submit("there", Batch(Blocks(address, address, one, zero + 1, zero + 1), 1, 1))
    assert transfer.outcome is not None
    assert transfer.outcome.ok is (code == 0)
    backend.close()
    ended = [("destroy",), ("unInitialize",)]
    assert [call for call in library.calls if call in ended] == []
    make().close()
    assert [call for call in library.calls if call in ended] == ([] if code else ended)


def test_a_former_engine_that_does_not_end_refuses_the_next_link(
    make: Callable[..., AscendBackend], library: Library
) -> None:
    """The library takes leave of a peer that stands still."""
    waits, goes_on = threading.Event(), threading.Event()

    def destroy() -> int:
        waits.set()
        assert goes_on.wait(30)
        return 0

    library.__dict__["destroy"] = destroy
    make("decode").close()
    assert not waits.is_set()
    try:
        for _ in range(2):
            with pytest.raises(
                BackendUnavailableError, match=r"last link has not ended .*one does not answer.*\nhint: see"
            ):
                make(connect_timeout=0.1)
    finally:
        goes_on.set()
    make()
