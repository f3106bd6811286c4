"""The embedded backend: bytes arrive, and nothing that was not granted does."""

from __future__ import annotations

import ctypes
import mmap
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.peers import until

from statelink.backend import BackendContext, Region
from statelink.errors import TransferError
from statelink.tcp import Options, TcpBackend

from .common import (
    MODES,
    POISON,
    SPACE,
    U64,
    batch_of,
    grant_all,
    join,
    opening,
    u64,
    untouched,
)
from .node import Node

if TYPE_CHECKING:
    from .remote import Remote

# Bytes arrive, and nothing else changes.


def test_a_peer_may_send_before_it_is_known(source: Remote, target: Remote) -> None:
    ours, theirs = source.do("open", "source"), target.do("open", "target")
    source.do("connect", "source", "target", theirs)
    early = source.do("write", "source", "target", 1, 1, u64(source.address), u64(target.address), u64(1000))
    time.sleep(0.1)
    assert source.do("pending", early)
    grant_all(target)
    target.do("connect", "target", "source", ours)
    assert source.do("outcome", early).ok
    assert np.array_equal(target.memory[:1000], source.memory[:1000])


def test_ipv6(here: Node) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    backends = [TcpBackend(BackendContext(options=Options(), link=link, host="::1")) for link in ("a", "b")]
    for ours, theirs, name in zip(backends, reversed(backends), ("b", "a"), strict=True):
        ours.register([Region(*here.region)])
        ours.connect(name, theirs.descriptor(), [Region(*here.region)])
    backends[1].grant("a", 1, 1, u64(here.address), u64(100))
    here.memory[100:200] = 1
    transfer = backends[0].submit("b", batch_of(here, source=u64(here.address + 100), target=u64(here.address)))
    assert until(lambda: transfer.outcome, what="the end").ok
    assert np.array_equal(here.memory[:11], [1] * 10 + [POISON])
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("mode", MODES)
def test_several_senders_at_once(here: Node, mode: str) -> None:
    memory = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    senders = [Node(memory) for _ in range(3)]
    theirs = here.open("target", **opening(mode))
    transfers = []
    for number, sender in enumerate(senders):
        name = f"source-{number}"
        here.connect("target", name, sender.open(name, **opening(mode)))
        sender.connect(name, "target", theirs)
        at = u64(here.address + (number << 20))
        here.grant("target", name, 1, 1, at, u64(1 << 20))
        transfers.append(sender.write(name, "target", 1, 1, u64(sender.address), at, u64(1 << 20)))
    for number, (sender, transfer) in enumerate(zip(senders, transfers, strict=True)):
        assert sender.outcome(transfer).ok
        assert np.array_equal(here.memory[number << 20 :][: 1 << 20], sender.memory)
        sender.close_all()
    assert untouched(here.memory[3 << 20 :])


# What is not granted does not land.


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_does_not_harm_its_neighbours(source: Remote, target: Remote, mode: str) -> None:
    """They are on one connection, and all under way at once."""
    join(source, target, mode)
    grant_all(target)
    source.memory[:] = np.random.default_rng(0).integers(0, 255, SPACE, np.uint8)
    step = 100_000
    transfers = [
        source.do("write", "source", "target", room, 1, u64(source.address + at), u64(target.address + at), u64(step))
        for room, at in ((1, 0), (2, step), (1, 2 * step), (2, 3 * step), (1, 4 * step))
    ]
    assert [source.do("outcome", transfer).ok for transfer in transfers] == [True, False, True, False, True]
    for part, at in enumerate(range(0, 5 * step, step)):
        there = target.memory[at : at + step]
        assert untouched(there) if part % 2 else np.array_equal(there, source.memory[at : at + step])


# Memory that has gone.


@pytest.fixture
def unmapped() -> int:
    """An address where `GONE` bytes were mapped, and where nothing may be read or written."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    # Such a mapping keeps the addresses, so that nothing else comes there.
    return int(libc.mmap(None, GONE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))


GONE = 1 << 16


@pytest.mark.parametrize("whose", ["sender", "receiver"])
def test_the_error_says_whose_memory_has_gone(here: Node, unmapped: int, whose: str) -> None:
    other = Node(np.zeros(GONE, np.uint8))
    nodes = {"sender": here, "receiver": other}
    nodes[whose].region = (unmapped, GONE)
    join(here, other)
    places = {name: unmapped if name == whose else node.address for name, node in nodes.items()}
    other.grant("target", "source", 1, 1, u64(places["receiver"]), u64(GONE))
    columns = u64(places["sender"], places["sender"] + 5000), u64(places["receiver"], places["receiver"] + 5000)
    outcome = here.outcome(here.write("source", "target", 1, 1, *columns, u64(5000, 100)))
    assert (outcome.ok, outcome.settled) == (False, True)
    assert outcome.reason.endswith(
        f"process_vm_readv: Bad address: the {whose}'s memory is not mapped any more; it must outlive its link: was it "
        "freed?"
    )
    other.close_all()


# What cannot be started is an error at once.


WRONG: dict[str, dict[str, Any]] = {
    "source before its region": {"source": lambda node: u64(node.address - 1)},
    "source beyond its region": {"nbytes": lambda node: u64(len(node.memory) + 1)},
    "source wraps": {"nbytes": lambda node: u64((1 << 64) - 1)},
    "unknown source region": {"source_region": lambda node: np.ones(1, np.uint32)},
    "target before its region": {"target": lambda node: u64(999)},
    "target beyond its region": {"target": lambda node: u64(1991)},
    "unknown target region": {"target_region": lambda node: np.ones(1, np.uint32)},
    "no bytes": {"nbytes": lambda node: u64(0)},
    "signed addresses": {"source": lambda node: np.array([node.address], np.int64)},
    "uneven arrays": {"target": lambda node: u64(1000, 1100)},
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_batch(here: Node, case: str) -> None:
    here.open("source")
    here.connect("source", "target", here.open("target"), (1000, 1000))
    changes = {name: make(here) for name, make in WRONG[case].items()}
    with pytest.raises(TransferError, match="a batch cannot be moved"):
        here.backends["source"].submit("target", batch_of(here, **changes))


def test_wrong_submit(here: Node) -> None:
    here.open("source")
    backend = here.backends["source"]
    with pytest.raises(TransferError, match="not connected"):
        backend.submit("nobody", batch_of(here))
    here.connect("source", "target", here.open("target"))
    none = np.zeros(0, np.uint64)
    with pytest.raises(TransferError, match="0 blocks"):
        backend.submit("target", batch_of(here, source=none, target=none, nbytes=none))
    with pytest.raises(TransferError, match="room"):
        backend.submit("target", batch_of(here)._replace(room=-1))


def test_wrong_grants(here: Node) -> None:
    here.open("target")
    cases: list[tuple[Any, U64]] = [
        (u64(here.address - 1), u64(2)),
        (u64(here.address), u64(len(here.memory) + 1)),
        (u64(here.address + 10, here.address), u64(5, 5)),
        (u64(here.address, here.address + 4), u64(5, 5)),
        (u64(here.address), u64(0)),
        (np.array([here.address], np.int64), u64(1)),
    ]
    for addresses, nbytes in cases:
        with pytest.raises(TransferError, match="cannot be granted"):
            here.grant("target", "source", 1, 1, addresses, nbytes)


def test_wrong_regions(here: Node) -> None:
    backend = TcpBackend(BackendContext(options=Options(), link="x"))
    with pytest.raises(TransferError, match="cuda:0"):
        backend.register([Region(*here.region), Region(1, 1, "cuda:0")])
    with pytest.raises(TransferError, match="disjoint"):
        backend.register([Region(*here.region), Region(here.address + 1, 1)])
    backend.close()
