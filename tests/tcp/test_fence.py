"""The embedded backend: what it declares, its fence, and the death of a peer."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.peers import until

from statelink.backend import Backend, BackendContext, Fence, Fencing, Side
from statelink.errors import BackendUnavailableError, ConfigError, TransferError
from statelink.tcp import Options, TcpBackend

from .common import (
    MODES,
    POISON,
    SLOWLY,
    SPACE,
    extra_process,
    grant_all,
    join,
    u64,
    untouched,
    write,
)
from .remote import Remote

if TYPE_CHECKING:
    from .node import Node

# Descriptors, options, declarations.


def test_wrong_descriptors(here: Node) -> None:
    good = here.open("target")
    here.open("source")
    random = np.random.default_rng(0)
    for raw in (
        b"",
        b"SLTCP",
        b"SLTCP\x02",
        b"SLTCP\x01" + good[6:],
        good[:-1],
        good + b"\0",
        b"x" * 100_000,
        good[:6] + random.bytes(100),
        good.replace(b"127.0.0.1", b"127.0.0.x"),
        good.replace(b"public", b"pablic"),
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
        {"streams": 65},
        {"connect_timeout": 0},
        {"stall_timeout": -1},
    ]
    for wrong in cases:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)


def test_declaration() -> None:
    backend = TcpBackend(BackendContext(options=Options(permit_ptrace=True), link="x"))
    assert isinstance(backend, Backend)
    assert isinstance(backend, Fencing)
    assert (backend.capabilities.source, backend.capabilities.target) == (Fence.MOVER, Fence.OWNER)
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


def congestion_controls() -> list[str]:
    """Those of this process's connections."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as sock:
            if sock.family is socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
                found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode())
    return found


def test_a_congestion_control_is_that_of_the_data_connections_or_is_refused(here: Node) -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    refused = TcpBackend.probe(Options(congestion="nobodys"))
    assert not refused.ok
    assert "'nobodys'" in refused.reason
    assert f"it allows {' '.join(allowed)}" in refused.reason
    with pytest.raises(ConfigError, match="ASCII"):
        Options(congestion="ä")
    for name in allowed:
        assert TcpBackend.probe(Options(congestion=name)).ok
        join(here, here, congestion=name)
        grant_all(here)
        assert write(here, here).ok
        assert congestion_controls() == [name, name]
        for link in ("source", "target"):
            here.close(link)


# The fence: nothing lands after a revoke, whatever the sender is doing.


def start_large(source: Any, target: Any, mode: str) -> int:
    """Start a batch that fills the target's memory, and return in the middle of it."""
    target.do("reads", **SLOWLY)
    join(source, target, mode, stall_timeout=0.0)
    grant_all(target)
    source.memory[:] = 1
    target.memory[:] = POISON
    transfer = source.do("write", "source", "target", 1, 1, u64(source.address), u64(target.address), u64(SPACE))
    until(lambda: target.memory[0] == 1, what="the first byte")
    return int(transfer)


@pytest.mark.parametrize("mode", MODES)
def test_revoke_in_the_middle(source: Remote, target: Remote, mode: str) -> None:
    transfer = start_large(source, target, mode)
    source.stop()
    try:
        revoked = target.do("outcome", target.do("revoke", "target", "source", 1, 1))
        assert revoked.ok
        assert target.memory[-1] == POISON, "the batch ended before it could be revoked"
        target.memory[:] = POISON
    finally:
        source.go_on()
    outcome = source.do("outcome", transfer)
    assert not outcome.ok
    assert outcome.settled is True
    assert "revoked" in outcome.reason
    assert untouched(target.memory)
    grant_all(target, room=2)
    assert write(source, target, room=2).ok
    assert np.array_equal(target.memory[:1001], [1] * 1000 + [POISON])


def test_revoke_waits_for_the_piece_in_progress(source: Remote, target: Remote) -> None:
    join(source, target)
    grant_all(target)
    assert write(source, target, nbytes=SPACE).ok  # the connection for large batches is made
    target.do("reads", held=True)
    place = u64(source.address), u64(target.address)
    transfer = source.do("write", "source", "target", 1, 1, *place, u64(SPACE))
    until(lambda: target.do("in_a_read"), what="a read")
    revokes = [target.do("revoke", "target", "source", 1, 1) for _ in range(2)]
    time.sleep(0.05)
    assert all(target.do("pending", revoke) for revoke in revokes)
    target.do("reads")
    assert all(target.do("outcome", revoke).ok for revoke in revokes)
    assert source.do("outcome", transfer).settled


@pytest.mark.parametrize("mode", MODES)
def test_disconnect_in_the_middle(source: Remote, target: Remote, mode: str) -> None:
    """Nothing lands after the destination disconnected; the sender's batch fails, settled."""
    transfer = start_large(source, target, mode)
    target.do("disconnect", "target", "source")
    assert target.memory[-1] == POISON, "the batch ended before the end of its peer"
    target.memory[:] = POISON
    outcome = source.do("outcome", transfer)
    assert not outcome.ok
    assert outcome.settled is True
    assert "lost the peer" in outcome.reason
    assert untouched(target.memory)


@pytest.mark.parametrize("mode", MODES)
def test_sender_disconnects_in_the_middle(source: Remote, target: Remote, mode: str) -> None:
    """The receiver's end of the connection proves that neither memory is touched any more."""
    transfer = start_large(source, target, mode)
    source.do("disconnect", "source", "target")
    outcome = source.do("settled", "source", transfer)  # a slow machine gives the proof after `disconnect` has returned
    target.memory[:] = POISON
    assert not outcome.ok
    assert outcome.settled is True
    assert "disconnected" in outcome.reason
    time.sleep(0.05)
    assert untouched(target.memory)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", [Remote.go_on, Remote.kill])
def test_stopped_receiver(source: Remote, mode: str, after: Callable[[Remote], None]) -> None:
    """A peer that stands still fails a transfer, which is settled once that peer has stopped copying for certain."""
    with extra_process() as target:
        before = source.do("held")
        join(source, target, mode, stall_timeout=1.0)
        grant_all(target)
        assert write(source, target, nbytes=SPACE).ok  # the connection for large batches is made
        target.stop()
        place = u64(source.address), u64(target.address)
        first = source.do("write", "source", "target", 1, 1, *place, u64(SPACE))
        stalled = source.do("outcome", first)
        transfer = source.do("write", "source", "target", 1, 1, *place, u64(10))
        source.do("disconnect", "source", "target")  # does not hang
        unsent = source.do("outcome", transfer)
        assert not stalled.ok
        # The source's side is settled where this process reads it: the destination's reads it itself in the other mode.
        assert stalled.settled == (Side.SOURCE if mode == "SEND" else False)
        assert "no progress" in stalled.reason
        assert not unsent.ok
        assert unsent.settled is True
        after(target)
        assert source.do("settled", "source", first).reason == stalled.reason
        source.do("close_all")
        assert source.do("held") == before


def test_a_stopped_receiver_is_left_behind_at_the_end(source: Remote) -> None:
    """Closing waits for nobody, and keeps no connection."""
    with extra_process() as target:
        before = source.do("held")
        join(source, target, stall_timeout=0.5)
        grant_all(target)
        assert write(source, target, nbytes=SPACE).ok  # the connection for large batches is made
        target.stop()
        place = u64(source.address), u64(target.address)
        transfer = source.do("write", "source", "target", 1, 1, *place, u64(SPACE))
        assert source.do("outcome", transfer).settled is False
        source.do("disconnect", "source", "target")
        source.do("close_all")
        assert source.do("held") == before


# Death.


@pytest.mark.parametrize("mode", MODES)
def test_killed_sender(target: Remote, mode: str) -> None:
    before = target.do("held")
    with extra_process() as dying, extra_process() as other:
        start_large(dying, target, mode)
        dying.kill()
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
        dying.kill()
        outcome = source.do("outcome", transfer)
        assert not outcome.ok
        assert outcome.settled is True
        assert "lost the peer" in outcome.reason
        again = write(source, dying)
        assert not again.ok
        assert again.settled is True
        assert "cannot reach it" in again.reason  # refused, or reset by a kernel that still closes the port

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
    outcome = write(source, target)
    if not outcome.ok:  # the source had not yet seen that the old connection is closed
        assert (outcome.reason, outcome.settled) == ("lost the peer: it closed the connection", True)
        outcome = write(source, target)
    assert outcome.ok
    assert np.array_equal(target.memory[:1000], source.memory[:1000])
