"""The embedded backend, between real processes; what arrived is looked at in memory, never through the backend."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from statelink.backend import Backend, BackendContext, Batch, Blocks, Fence, Fencing, Op, Region, Side
from statelink.errors import BackendUnavailableError, ConfigError, StatelinkError, TransferError, UnsupportedError
from statelink.tcp import Options, TcpBackend, _frames, _handshake, _iovec
from statelink.tcp._descriptor import Descriptor, pair_key
from statelink.tcp._iovec import Vectors
from statelink.tcp._ranges import Ranges, RegionTable
from statelink.tcp._stream import Lost, Stream, Waker

from .helpers.tcp_node import EVERYTHING, Node, Remote, make_file, wait_for

U64 = npt.NDArray[np.uint64]

SPACE = 24 << 20
POISON = 0xA5
MODES = ("COPY", "SEND")
SMALL_BUFFERS = {"send_buffer": 32 << 10, "receive_buffer": 32 << 10}


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Remote, Remote]]:
    """A source and a destination, each in a process of its own, shared by all tests that leave them intact."""
    pair = Remote(SPACE), Remote(SPACE)
    yield pair
    for remote in pair:
        remote.end()


@pytest.fixture
def source(processes: tuple[Remote, Remote]) -> Iterator[Remote]:
    yield processes[0]
    processes[0].do("close_all")


@pytest.fixture
def target(processes: tuple[Remote, Remote]) -> Iterator[Remote]:
    processes[1].memory[:] = POISON
    yield processes[1]
    processes[1].do("close_all")


@pytest.fixture
def here() -> Iterator[Node]:
    """A node in the test's own process."""
    path = make_file(4 << 20)
    node = Node(path)
    node.memory[:] = POISON
    os.unlink(path)
    yield node
    node.close_all()


@contextlib.contextmanager
def extra_process(nbytes: int = SPACE) -> Iterator[Remote]:
    remote = Remote(nbytes)
    remote.memory[:] = POISON
    try:
        yield remote
    finally:
        remote.end()


def join(source: Any, target: Any, mode: str = "COPY", *, a: str = "source", b: str = "target", **options: Any) -> None:
    """Open a link at both ends and connect them; everything at the target is claimed to be one region."""
    options = {"same_host_copy": mode == "COPY", **options}
    ours, theirs = source.do("open", a, **options), target.do("open", b, **options)
    source.do("connect", a, b, theirs)
    target.do("connect", b, a, ours)


def grant_all(target: Any, room: int = 1, generation: int = 1, *, a: str = "source", b: str = "target") -> None:
    target.do("grant", b, a, room, generation, u64(target.address), u64(len(target.memory)))


def write(source: Any, target: Any, *, room: int = 1, generation: int = 1, at: int = 0, nbytes: int = 1000) -> Any:
    """Write one block to ``at`` of the target; the outcome."""
    blocks = u64(source.address), u64(target.address + at), u64(nbytes)
    return source.do("outcome", source.do("write", "source", "target", room, generation, *blocks))


def untouched(memory: npt.NDArray[np.uint8]) -> bool:
    return bool((memory == POISON).all())


# Bytes arrive, and nothing else changes.

SHAPES = {
    "one byte": (1, 1, 1),
    "one large": (1, (5 << 20) + 3, (5 << 20) + 3),
    "few unaligned": (7, 1, 1 << 20),
    "pages": (1024, 16 << 10, 16 << 10),
    "a thousand unaligned": (1000, 1, 4096),
    "twenty thousand": (20_000, 1, 512),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_arrive(source: Remote, target: Remote, mode: str, shape: str) -> None:
    count, least, most = SHAPES[shape]
    random = np.random.default_rng(count)
    source.memory[:] = random.integers(0, 255, SPACE, np.uint8)
    nbytes = random.integers(least, most, count, np.uint64, endpoint=True)
    places = []
    for _ in range(2):  # random order and random gaps, at both ends
        order = random.permutation(count)
        room = nbytes + random.integers(0, max(1, (SPACE - int(nbytes.sum())) // count), count, np.uint64)
        offsets = np.empty(count, np.uint64)
        offsets[order] = np.concatenate((u64(0), np.cumsum(room[order])[:-1]))
        places.append(offsets)
    expected = target.memory.copy()
    for here, there, length in zip(*(array.tolist() for array in (*places, nbytes)), strict=True):
        expected[there : there + length] = source.memory[here : here + length]

    join(source, target, mode)
    order = np.argsort(places[1])
    target.do("grant", "target", "source", 7, 9, places[1][order] + np.uint64(target.address), nbytes[order])
    blocks = places[0] + np.uint64(source.address), places[1] + np.uint64(target.address), nbytes
    outcome = source.do("outcome", source.do("write", "source", "target", 7, 9, *blocks))

    assert outcome == (True, "", True)
    assert np.array_equal(target.memory, expected)
    assert source.do("mode", "source", "target") == mode


def test_many_batches_under_way(source: Remote, target: Remote) -> None:
    source.memory[:] = np.random.default_rng(0).integers(0, 255, SPACE, np.uint8)
    join(source, target)
    grant_all(target)
    step = SPACE // 64
    transfers = [
        source.do("write", "source", "target", 1, 1, u64(source.address + at), u64(target.address + at), u64(step))
        for at in range(0, SPACE, step)
    ]
    assert all(source.do("outcome", transfer).ok for transfer in transfers)
    assert np.array_equal(source.memory, target.memory)


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
    assert wait_for(lambda: transfer.outcome, "the end").ok
    assert np.array_equal(here.memory[:11], [1] * 10 + [POISON])
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("mode", MODES)
def test_several_senders_at_once(here: Node, mode: str) -> None:
    path = make_file(1 << 20)
    senders = [Node(path) for _ in range(3)]
    os.unlink(path)
    senders[0].memory[:] = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    theirs = here.open("target", same_host_copy=mode == "COPY")
    transfers = []
    for number, sender in enumerate(senders):
        name = f"source-{number}"
        here.connect("target", name, sender.open(name, same_host_copy=mode == "COPY"))
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


@pytest.fixture
def unchecked(here: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A source in this process that sends what it should not."""
    monkeypatch.setattr(RegionTable, "outside", lambda *_: None)
    return here


END = 5 << 20
REFUSED = {
    "one byte before": ([100 - 1], [50]),
    "one byte beyond": ([END - 50], [51]),
    "between two grants": ([150], [100]),
    "far away": ([10 << 20], [1]),
    "the second of two": ([100, 99], [10, 1]),
    "across the gap": ([190], [30]),
    "ends where addresses do": ([-1], [1]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", REFUSED)
def test_ungranted_range(unchecked: Node, target: Remote, mode: str, case: str) -> None:
    offsets, lengths = REFUSED[case]
    join(unchecked, target, mode)
    first = u64(target.address + 100, target.address + 210)
    target.do("grant", "target", "source", 1, 1, first, u64(100, END - 210))
    places = u64(*((target.address + offset) if offset >= 0 else (1 << 64) + offset for offset in offsets))
    sources = u64(*([unchecked.address] * len(offsets)))
    outcome = unchecked.outcome(unchecked.write("source", "target", 1, 1, sources, places, u64(*lengths)))
    assert not outcome.ok
    assert outcome.settled
    assert "outside of what is granted for room 1" in outcome.reason
    assert untouched(target.memory)
    assert write(unchecked, target, at=150, nbytes=50).ok  # the connection lives on
    assert np.array_equal(target.memory[150:200], unchecked.memory[:50])


@pytest.mark.parametrize(("room", "generation"), [(2, 1), (1, 2), (0, 0), ((1 << 64) - 1, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_ungranted_room(source: Remote, target: Remote, mode: str, room: int, generation: int) -> None:
    join(source, target, mode)
    grant_all(target)
    outcome = write(source, target, room=room, generation=generation, nbytes=3 << 20)
    assert not outcome.ok
    assert outcome.settled
    assert f"no grant for room {room}, generation {generation}" in outcome.reason
    assert untouched(target.memory)
    assert write(source, target).ok


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


def test_grant_of_another_peer(source: Remote, target: Remote) -> None:
    join(source, target)
    grant_all(target, a="somebody else")
    assert "no grant for room 1" in write(source, target).reason
    assert untouched(target.memory)


def test_grants_add_up_and_are_taken_back(source: Remote, target: Remote) -> None:
    join(source, target)
    for at, nbytes in ((0, 500), (600, 400), (450, 200)):
        target.do("grant", "target", "source", 1, 1, u64(target.address + at), u64(nbytes))
    assert not write(source, target, nbytes=1001).ok
    assert write(source, target).ok  # one block across all
    assert target.do("outcome", target.do("revoke", "target", "source", 1, 1)).ok
    assert target.do("outcome", target.do("revoke", "target", "source", 1, 1)).ok
    target.memory[:] = POISON
    assert "no grant" in write(source, target).reason
    assert untouched(target.memory)
    grant_all(target)
    assert write(source, target).ok


# What cannot be started is an error at once.


def batch_of(node: Node, **changes: Any) -> Batch:
    zeros = np.zeros(1, np.uint32)
    columns = {
        "source": u64(node.address),
        "target": u64(1000),
        "nbytes": u64(10),
        "source_region": zeros,
        "target_region": zeros,
    }
    return Batch(Op.WRITE, Blocks(**{**columns, **changes}), 1, 1)


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
    with pytest.raises(UnsupportedError, match="READ"):
        backend.submit("nobody", batch_of(here)._replace(op=Op.READ))
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


# Descriptors, options, declarations.


def test_wrong_descriptors(here: Node) -> None:
    good = here.open("target")
    here.open("source")
    random = np.random.default_rng(0)
    for raw in (
        b"",
        b"SLTCP",
        b"SLTCP\x01",
        b"SLTCP\x02" + good[6:],
        good[:-1],
        good + b"\0",
        b"x" * 100_000,
        good[:6] + random.bytes(100),
        good.replace(b"127.0.0.1", b"127.0.0.x"),
        good.replace(b"secret", b"sacred"),
    ):
        with pytest.raises(TransferError, match="descriptor is refused"):
            here.connect("source", "target", raw)
    with pytest.raises(TransferError, match="that of 'target'"):
        here.connect("source", "somebody else", good)
    with pytest.raises(TransferError, match="itself"):
        here.connect("target", "target", good)


def test_options() -> None:
    cases: list[dict[str, Any]] = [
        {"port": -1},
        {"host": "localhost"},
        {"piece_bytes": 1},
        {"connect_timeout": 0},
        {"max_pending": 0},
    ]
    for wrong in cases:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)


def test_declaration() -> None:
    backend = TcpBackend(BackendContext(options=Options(permit_ptrace=True), link="x"))
    assert isinstance(backend, Backend)
    assert isinstance(backend, Fencing)
    fences = backend.capabilities.fences
    assert fences == {(Op.WRITE, Side.SOURCE): Fence.MOVER, (Op.WRITE, Side.TARGET): Fence.OWNER}
    backend.close()


def test_probe_and_port() -> None:
    assert TcpBackend.probe(Options()).details["same_host_copy"] == "yes"
    assert TcpBackend.probe(Options(same_host_copy=False)).details["same_host_copy"] == "off"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        probe = TcpBackend.probe(Options(port=port))
        assert not probe.ok
        assert "in use" in probe.reason
        with pytest.raises(BackendUnavailableError, match="in use"):
            TcpBackend(BackendContext(options=Options(port=port), link="x"))
    with pytest.raises(BackendUnavailableError, match="localhost"):
        TcpBackend(BackendContext(options=Options(), link="x", host="localhost"))


# The fence: nothing lands after a revoke, whatever the sender is doing.


def start_large(source: Any, target: Any, mode: str) -> int:
    """Start a batch that fills the target's memory, and return in the middle of it."""
    options: dict[str, Any] = {"piece_bytes": 4096, "drain_timeout": 10.0, "stall_timeout": 0.0}
    if mode == "SEND":
        options.update(SMALL_BUFFERS)
    else:
        target.do("slow_down")
    join(source, target, mode, **options)
    grant_all(target)
    source.memory[:] = 1
    target.memory[:] = POISON
    transfer = source.do("write", "source", "target", 1, 1, u64(source.address), u64(target.address), u64(SPACE))
    wait_for(lambda: target.memory[0] == 1, "the first byte")
    return int(transfer)


@pytest.mark.parametrize("mode", MODES)
def test_revoke_in_the_middle(source: Remote, target: Remote, mode: str) -> None:
    transfer = start_large(source, target, mode)
    source.signal(signal.SIGSTOP)
    try:
        revoked = target.do("outcome", target.do("revoke", "target", "source", 1, 1))
        assert revoked.ok
        assert target.memory[-1] == POISON, "the batch ended before it could be revoked"
        target.memory[:] = POISON
    finally:
        source.signal(signal.SIGCONT)
    outcome = source.do("outcome", transfer)
    assert not outcome.ok
    assert outcome.settled
    assert "revoked" in outcome.reason
    assert untouched(target.memory)
    grant_all(target, room=2)
    assert write(source, target, room=2).ok
    assert np.array_equal(target.memory[:1001], [1] * 1000 + [POISON])


def test_revoke_waits_for_the_piece_in_progress(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    join(here, here)
    grant_all(here)
    half = len(here.memory) // 2
    blocks = u64(here.address), u64(here.address + half), u64(half)
    assert here.outcome(here.write("source", "target", 1, 1, *blocks)).ok
    inside, go_on, copy = threading.Event(), threading.Event(), _iovec.copy

    def held_up(*arguments: Any) -> int:
        inside.set()
        assert go_on.wait(20)
        return copy(*arguments)

    monkeypatch.setattr(_iovec, "copy", held_up)
    transfer = here.write("source", "target", 1, 1, *blocks)
    assert inside.wait(20)
    revokes = [here.revoke("target", "source", 1, 1) for _ in range(2)]
    time.sleep(0.05)
    assert all(here.pending(revoke) for revoke in revokes)
    go_on.set()
    assert all(here.outcome(revoke).ok for revoke in revokes)
    assert here.outcome(transfer).settled


@pytest.mark.parametrize("mode", MODES)
def test_disconnect_in_the_middle(source: Remote, target: Remote, mode: str) -> None:
    """Nothing lands after the destination disconnected; the sender's batch fails, settled."""
    transfer = start_large(source, target, mode)
    target.do("disconnect", "target", "source")
    assert target.memory[-1] == POISON, "the batch ended before the end of its peer"
    target.memory[:] = POISON
    outcome = source.do("outcome", transfer)
    assert not outcome.ok
    assert outcome.settled
    assert "lost the peer" in outcome.reason
    assert untouched(target.memory)


@pytest.mark.parametrize("mode", MODES)
def test_sender_disconnects_in_the_middle(source: Remote, target: Remote, mode: str) -> None:
    """The receiver's end of the connection proves that neither memory is touched any more."""
    transfer = start_large(source, target, mode)
    source.do("disconnect", "source", "target")
    outcome = source.do("outcome", transfer)
    target.memory[:] = POISON
    assert not outcome.ok
    assert outcome.settled
    assert "disconnected" in outcome.reason
    time.sleep(0.05)
    assert untouched(target.memory)


@pytest.mark.parametrize("mode", MODES)
def test_stopped_receiver(source: Remote, target: Remote, mode: str) -> None:
    """A peer that stands still fails a transfer in time, but proves nothing: it is not settled."""
    options: dict[str, Any] = {"stall_timeout": 1.0, "drain_timeout": 0.1, **SMALL_BUFFERS}
    join(source, target, mode, **options)
    grant_all(target)
    assert write(source, target).ok
    target.signal(signal.SIGSTOP)
    try:
        stalled = write(source, target, nbytes=SPACE)
        transfer = source.do("write", "source", "target", 1, 1, u64(source.address), u64(target.address), u64(10))
        source.do("disconnect", "source", "target")  # does not hang
        unsent = source.do("outcome", transfer)
    finally:
        target.signal(signal.SIGCONT)
    assert not stalled.ok
    assert not stalled.settled
    assert "no progress" in stalled.reason
    assert not unsent.ok
    assert unsent.settled


# Death.


@pytest.mark.parametrize("mode", MODES)
def test_killed_sender(target: Remote, mode: str) -> None:
    before = target.do("held")
    with extra_process() as dying, extra_process() as other:
        start_large(dying, target, mode)
        dying.signal(signal.SIGKILL)
        dying.process.join()
        other.memory[:] = 2
        target.do("connect", "target", "other", other.do("open", "other"))
        target.do("grant", "target", "other", 1, 1, u64(target.address), u64(100))
        other.do("connect", "other", "target", target.do("descriptor", "target"))
        done = other.do("write", "other", "target", 1, 1, u64(other.address), u64(target.address), u64(100))
        assert other.do("outcome", done).ok
        assert (target.memory[:100] == 2).all()
        assert target.do("outcome", target.do("revoke", "target", "source", 1, 1)).ok
        target.do("close_all")
        assert target.do("held") == before


@pytest.mark.parametrize("mode", MODES)
def test_killed_receiver(source: Remote, mode: str) -> None:
    before = source.do("held")
    with extra_process() as dying, extra_process() as other:
        transfer = start_large(source, dying, mode)
        dying.signal(signal.SIGKILL)
        outcome = source.do("outcome", transfer)
        assert not outcome.ok
        assert outcome.settled
        assert "lost the peer" in outcome.reason
        again = write(source, dying)
        assert not again.ok
        assert again.settled
        assert "Connection refused" in again.reason

        source.do("connect", "source", "other", other.do("open", "other"))
        other.do("connect", "other", "source", source.do("descriptor", "source"))
        grant_all(other, b="other")
        done = source.do("write", "source", "other", 1, 1, u64(source.address), u64(other.address), u64(100))
        assert source.do("outcome", done).ok
        assert (other.memory[:100] == 1).all()
        source.do("close_all")
        assert source.do("held") == before


def test_reconnects_after_the_peer_dropped_it(source: Remote, target: Remote) -> None:
    join(source, target)
    grant_all(target)
    assert write(source, target).ok
    ours = source.do("descriptor", "source")
    target.do("disconnect", "target", "source")
    target.do("connect", "target", "source", ours)
    grant_all(target)
    target.memory[:] = POISON
    assert write(source, target).ok
    assert np.array_equal(target.memory[:1000], source.memory[:1000])


# Strangers at the data port.


class Caller:
    """Somebody who calls a data port; ``key`` is what it believes to be the key."""

    def __init__(self, own: bytes, own_name: str, peer: bytes, peer_name: str) -> None:
        self.own, self.peer = Descriptor.decode(own, own_name), Descriptor.decode(peer, peer_name)
        self.key = pair_key(self.own, self.peer)
        self.waker = Waker()

    def dial(self) -> Stream:
        options = Options(connect_timeout=2.0)
        return _handshake.dial(self.own, self.peer, self.key, options, self.waker, lambda: None)[0]

    def plain(self) -> socket.socket:
        sock = socket.create_connection((self.peer.host, self.peer.port))
        sock.settimeout(10)
        return sock


@pytest.fixture
def caller(here: Node) -> Iterator[Caller]:
    """A caller that ``target`` in this process knows as ``source``, and has granted everything."""
    theirs = here.open("target", handshake_timeout=0.5, max_pending=4)
    ours = here.open("source")
    here.connect("target", "source", ours)
    grant_all(here)
    caller = Caller(ours, "source", theirs, "target")
    yield caller
    caller.waker.close()


def closed_by_peer(sock: socket.socket) -> bool:
    with sock:
        try:
            while sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True


def still_serves(here: Node) -> bool:
    here.connect("source", "target", here.descriptor("target"))
    transfer = here.write("source", "target", 1, 1, u64(here.address), u64(here.address + 5000), u64(100))
    return here.outcome(transfer).ok


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 100,
        b"\xff" * 100_000,
        b"\x05\x00junk!",
        _handshake.frame(_handshake.Hello("source", "somebody else", bytes(32))),
        _handshake.frame(_handshake.Proof(bytes(32), 1, 1)),
        _handshake.frame(_handshake.Hello("source", "target", bytes(32))) + b"\x02\x00ab",
        _handshake.frame(_handshake.Hello("source", "target", bytes(32)))
        + _handshake.frame(_handshake.Proof(bytes(32), os.getpid(), 1 << 20)),
        _handshake.frame(_handshake.Hello("nobody", "target", bytes(32))),
        _handshake.frame(_handshake.Hello("nobody", "target", bytes(32))) * 2,
        b"",
    ],
)
def test_garbage_is_dropped(here: Node, caller: Caller, raw: bytes) -> None:
    sock = caller.plain()
    with contextlib.suppress(ConnectionError):
        sock.sendall(raw)
    assert closed_by_peer(sock)
    assert still_serves(here)


def test_wrong_keys(here: Node, caller: Caller) -> None:
    """Neither side speaks to one that does not hold the key."""
    right = caller.key
    caller.key = bytes(32)
    with pytest.raises(Lost, match="does not hold the key"):
        caller.dial()
    hello = _handshake.Hello("source", "target", bytes(32))
    sock = caller.plain()
    sock.sendall(_handshake.frame(hello))
    length = int.from_bytes(sock.recv(2), "little")
    challenge = _handshake.decode(sock.recv(length), _handshake.Challenge)
    proof = _handshake.Proof(challenge.proof, 0, 0)  # reflected
    assert not _handshake.verify(right, hello, challenge.nonce, proof)
    sock.sendall(_handshake.frame(proof))
    assert closed_by_peer(sock)
    assert still_serves(here)


def test_one_peer_cannot_pose_as_another(here: Node, caller: Caller) -> None:
    """It knows the target's secret and the other's name, but not the other's secret."""
    impostor = Descriptor.decode(here.open("impostor"), "impostor")
    caller.own = Descriptor(link="source", host="127.0.0.1", port=1, secret=impostor.secret)
    caller.key = pair_key(caller.own, caller.peer)
    with pytest.raises(Lost, match="does not hold the key"):
        caller.dial()


def test_slow_callers(here: Node, caller: Caller) -> None:
    """However many hang around, and however slowly they speak, the port serves others, and they are dropped."""
    hello = _handshake.frame(_handshake.Hello("source", "target", bytes(32)))
    socks = []
    for number in range(12):
        socks.append(caller.plain())
        socks[-1].sendall(hello[: number * 3])
    assert still_serves(here)
    assert all(closed_by_peer(sock) for sock in socks)


def test_wrong_proof_of_memory(here: Node, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid and address where the token is not: the receiver does not read from there."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert still_serves(here)
    assert here.mode("source", "target") == "SEND"


def test_only_the_token_proves_a_memory(here: Node) -> None:
    key, hello, nonce = bytes(32), _handshake.Hello("a", "b", bytes(32)), bytes(32)
    right = np.frombuffer(_handshake._token(key, hello, nonce), np.uint8)
    stale = np.frombuffer(_handshake._token(key, hello, bytes(31) + b"x"), np.uint8)
    cases = (
        (os.getpid(), right, True),
        (os.getpid(), stale, False),
        (os.getpid(), right[1:], False),
        (0, right, False),
    )
    for pid, memory, expected in cases:
        proof = _handshake.Proof(bytes(32), pid, memory.ctypes.data)
        assert _handshake.witness(key, hello, nonce, proof) is expected
    assert not _handshake.witness(key, hello, nonce, _handshake.Proof(bytes(32), os.getpid(), 1))


HEADER = struct.Struct("<4sBxxxI4xQQQQ")


@pytest.mark.parametrize(
    "raw",
    [
        b"x" * 48,
        HEADER.pack(b"SLw1", 3, 1, 1, 1, 1, 1),
        HEADER.pack(b"SLw1", 1, 0, 1, 1, 1, 0),
        HEADER.pack(b"SLw1", 1, (1 << 15) + 1, 1, 1, 1, 1 << 20),
        HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 1 << 63),
        HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 7) + struct.pack("<QQ", 4096, 8),
        HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 7) + struct.pack("<QQ", 4096, 0),
        HEADER.pack(b"SLw1", 1, 2, 1, 1, 1, 7) + struct.pack("<QQQQ", 0, 0, (1 << 64) - 1, 8),
    ],
)
def test_malformed_batches(here: Node, caller: Caller, raw: bytes) -> None:
    stream = caller.dial()
    stream.write(raw)
    with pytest.raises(Lost):
        stream.read(memoryview(bytearray(1)))
    stream.close()
    assert untouched(here.memory)
    assert still_serves(here)


@pytest.mark.parametrize("mode", [1, 2])
def test_wrapped_address(here: Node, caller: Caller, mode: int) -> None:
    """Their end, computed in 64 bits, comes before their start."""
    stream = caller.dial()
    blocks = np.array([[here.address, (1 << 64) - 8], [8, 1 << 45], [here.address, 1 << 20]], np.uint64)
    stream.write(HEADER.pack(b"SLw1", mode, 2, 1, 1, 1, 8 + (1 << 45)) + blocks[: mode + 1].tobytes())
    answer = bytearray(_frames.REPLY.size)
    stream.read(memoryview(answer))
    reply = _frames.unpack_reply(answer)
    assert reply.status is _frames.Status.REFUSED
    reason = bytearray(reply.length)
    stream.read(memoryview(reason))
    assert b"block 1" in reason
    stream.close()
    assert untouched(here.memory)


def test_copy_from_a_process_that_was_not_proven(here: Node, caller: Caller) -> None:
    caller.own = Descriptor.decode(here.open("far", same_host_copy=False), "far")
    here.connect("target", "far", here.descriptor("far"))
    here.grant("target", "far", 1, 1, u64(here.address), u64(100))
    caller.key = pair_key(caller.own, caller.peer)
    stream = caller.dial()
    stream.write(HEADER.pack(b"SLw1", 2, 1, 5, 1, 1, 100) + struct.pack("<QQQ", here.address, 100, here.address + 200))
    answer = bytearray(_frames.REPLY.size)
    stream.read(memoryview(answer))
    assert _frames.unpack_reply(answer)[:2] == (_frames.Status.RESEND, 5)
    stream.close()
    assert untouched(here.memory)


# The kernel's refusal.


def test_memory_may_not_be_read(here: Node, source: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_iovec, "_process_vm_readv", refuse)
    join(source, here)
    grant_all(here)
    monkeypatch.undo()
    here_copies(source, here, "SEND")


def test_memory_may_not_be_read_any_more(here: Node, source: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    join(source, here)
    grant_all(here)
    here_copies(source, here, "COPY")
    monkeypatch.setattr(_iovec, "_process_vm_readv", refuse)
    here_copies(source, here, "SEND")


def refuse(*_: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def here_copies(source: Remote, here: Node, mode: str) -> None:
    source.memory[:1000] = np.random.default_rng().integers(0, 255, 1000, np.uint8)
    assert write(source, here).ok
    assert np.array_equal(here.memory[:1000], source.memory[:1000])
    assert untouched(here.memory[1000:])
    assert source.do("mode", "source", "target") == mode


# Nothing is left behind.


def test_close_twice(here: Node) -> None:
    join(here, here)
    grant_all(here)
    assert here.outcome(here.write("source", "target", 1, 1, u64(here.address), u64(here.address + 9), u64(5))).ok
    backends = list(here.backends.values())
    for backend in backends:
        backend.disconnect("nobody")
        backend.close()
        backend.close()
        backend.disconnect("target")
    with pytest.raises(TransferError, match="not connected"):
        backends[0].submit("target", batch_of(here))
    with pytest.raises(TransferError, match="closed"):
        backends[0].connect("target", backends[1].descriptor(), ())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_leaks(here: Node, mode: str) -> None:
    path = make_file(4096)
    other = Node(path)
    os.unlink(path)
    before = here.held()
    ours, theirs = here.open("target"), other.open("source", same_host_copy=mode == "COPY")
    opened = here.held()
    for at in range(50):
        here.connect("target", "source", theirs)
        other.connect("source", "target", ours)
        here.grant("target", "source", 1, at, u64(here.address), u64(4096))
        done = other.write("source", "target", 1, at, u64(other.address), u64(here.address), u64(4096))
        assert other.outcome(done).ok
        here.disconnect("target", "source")
        other.disconnect("source", "target")
    assert here.held() == opened
    assert not here.backends["target"]._grants._grants
    here.close_all()
    other.close_all()
    assert here.held() == before


def test_threads_are_bounded(here: Node) -> None:
    """A peer that connects again and again has one thread, which serves its last connection."""
    ours, theirs = here.open("source"), here.open("target")
    here.connect("target", "source", ours)
    grant_all(here)
    before = threading.active_count()
    caller = Caller(ours, "source", theirs, "target")
    streams = [caller.dial() for _ in range(10)]
    assert threading.active_count() == before + 1
    for stream in streams[:-1]:
        with pytest.raises(Lost):
            stream.read(memoryview(bytearray(1)))
        stream.close()
    streams[-1].write(HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 3) + struct.pack("<QQ", here.address, 3) + b"abc")
    streams[-1].read(memoryview(bytearray(_frames.REPLY.size)))
    assert here.memory[:4].tobytes() == b"abc" + bytes([POISON])
    streams[-1].close()
    caller.waker.close()


# The parts.


def test_windows_cover_every_byte() -> None:
    random = np.random.default_rng(0)
    nbytes = random.integers(1, 50, 3000, np.uint64)
    addresses = np.cumsum(nbytes + random.integers(0, 2, 3000, np.uint64))
    vectors = Vectors(addresses, nbytes)
    wanted = np.concatenate([np.arange(a, a + n) for a, n in zip(addresses.tolist(), nbytes.tolist(), strict=True)])
    assert vectors.total == len(wanted)
    position, seen = 0, []
    while position < vectors.total:
        pointer, count = vectors.window(position, int(random.integers(1, 60_000)))
        assert 0 < count <= 1024
        table = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(pointer)).reshape(count, 2)
        part = np.concatenate([np.arange(a, a + n) for a, n in table.tolist()])
        part = part[: int(random.integers(1, len(part) + 1))]  # a partial call
        seen.append(part)
        position += len(part)
    assert np.array_equal(np.concatenate(seen), wanted)


def test_ranges_against_a_list_of_bytes() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        granted = np.zeros(64, np.bool_)
        granted[random.integers(0, 64, 40)] = True
        cuts = random.integers(0, 2, 64).astype(np.bool_)
        starts = [at for at in range(64) if granted[at] and (not at or not granted[at - 1] or cuts[at])]
        ends = [next((to for to in range(at + 1, 64) if not granted[to] or to in starts), 64) for at in starts]
        ranges = Ranges(u64(*starts), u64(*ends) - u64(*starts))
        addresses, nbytes = random.integers(0, 64, 20, np.uint64), random.integers(0, 9, 20, np.uint64)
        inside = [
            n > 0 and a + n <= 64 and granted[a : a + n].all()
            for a, n in zip(addresses.tolist(), nbytes.tolist(), strict=True)
        ]
        expected = None if all(inside) else inside.index(False)
        assert ranges.outside(addresses, nbytes) == expected


def test_ranges_at_the_end_of_memory() -> None:
    top = (1 << 64) - 4096
    ranges = Ranges(u64(top), u64(4096))
    assert ranges.outside(u64(top, top + 4095), u64(4096, 1)) is None
    assert ranges.outside(u64(top), u64(4097)) == 0
    assert ranges.outside(u64(top + 1), u64((1 << 64) - 1)) == 0
    table = RegionTable([Region(*EVERYTHING)])
    assert table.outside(np.zeros(1, np.uint32), u64(1), u64((1 << 64) - 1)) is None
    assert table.outside(np.zeros(1, np.uint32), u64(2), u64((1 << 64) - 1)) == 0
    with pytest.raises(ValueError, match="disjoint"):
        Ranges(u64(top), u64(4097))


def test_errors_have_the_usual_shape(here: Node) -> None:
    here.open("source")
    with pytest.raises(StatelinkError) as caught:
        here.backends["source"].submit("nobody", batch_of(here))
    assert caught.value.code == "backend.transfer"
    assert caught.value.reason.who["peer"] == "nobody"
