"""Which transport carries the bytes: what UCX may use, what is left of it, and what a real probe tells."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from plugins.nixl.tests.peer import Memory, Peer, make
from plugins.nixl.tests.test_package import needs_nixl

from statelink.backend import Verdict
from statelink_nixl import NixlBackend, Options, _diagnosis, _transport

if TYPE_CHECKING:
    from pathlib import Path

ALL = frozenset({"rdma", "tcp", "shm", "cuda_ipc"})


@pytest.mark.parametrize(
    ("setting", "may"),
    [
        ("all", ALL),
        ("rc", {"rdma"}),
        ("rc,tcp", {"rdma", "tcp"}),
        ("rc_mlx5:aux,self", {"rdma"}),
        ("sm,tcp", {"shm", "tcp"}),
        ("^tcp", ALL - {"tcp"}),
        ("^tcp,sm", ALL - {"tcp", "shm"}),
        ("^cma,posix", ALL),
        ("something_new", ALL),
    ],
)
def test_what_a_setting_leaves(setting: str, may: frozenset[str]) -> None:
    assert _transport._of_setting(setting) == may


def test_devices_and_other_backends_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transport, "rdma_devices", lambda: ["mlx5_0"])
    assert "rdma" in _transport.possible(Options(), {})
    assert _transport.possible(Options(), {"UCX_TLS": "rc"}) == {"rdma"}
    assert _transport.possible(Options(ucx={"TLS": "tcp"}), {"UCX_TLS": "rc"}) == {"tcp"}
    assert not _transport.possible(Options(backends={"LIBFABRIC": {}}), {})
    monkeypatch.setattr(_transport, "rdma_devices", list)
    assert "rdma" not in _transport.possible(Options(), {})


@pytest.mark.parametrize(
    ("may", "near", "dram", "over_tcp", "word"),
    [
        ({"rdma"}, True, True, None, "rdma"),
        ({"rdma", "tcp", "shm"}, False, True, None, "unknown"),
        ({"rdma", "tcp", "shm"}, False, True, False, "rdma"),
        ({"rdma", "tcp", "shm"}, False, True, True, "tcp"),
        ({"rdma", "tcp", "shm"}, True, True, False, "unknown"),
        ({"tcp", "shm"}, True, True, False, "shm"),
        ({"rdma", "tcp"}, False, False, False, "unknown"),
        ({"tcp", "cuda_ipc"}, True, False, None, "unknown"),
        (set(), False, True, True, "unknown"),
    ],
)
def test_what_is_left(may: set[str], near: bool, dram: bool, over_tcp: bool | None, word: str) -> None:
    assert _transport.told(frozenset(may), near=near, dram=dram, over_tcp=over_tcp) == word


def test_the_kernel_counts_what_tcp_sent() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    with listener, client, server:
        before = _transport.sent_over_tcp()
        client.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(server.recv(1 << 20))
        assert 100_000 <= _transport.sent_over_tcp() - before < 110_000


@needs_nixl
@pytest.mark.parametrize(
    ("tls", "word"),
    [
        ("tcp", "tcp"),  # named
        ("sm,tcp,self", "shm"),  # probed: the kernel saw nothing
        ("^posix,sysv,cma,xpmem,knem", "tcp"),  # probed: all of the ways within a host are off, one by one
    ],
)
def test_a_real_peer(tls: str, word: str, tmp_path: Path) -> None:
    options = {"ucx": {"TLS": tls}}
    peer = Peer(tmp_path / "peer", "far", [[4096]], options)
    memory = Memory(tmp_path, [[4096]])
    backend = make("near", options)
    try:
        backend.register(memory.regions)
        peer.ready().invite("near", backend.descriptor(), memory.regions)
        backend.connect("far", peer.descriptor, peer.regions)
        assert isinstance(backend, NixlBackend)
        assert backend.transport("far") == word
        assert backend.transport("nobody") == "unknown"
    finally:
        backend.close()
        peer.kill()


def test_the_packages_of_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(installed: dict[str, str], cuda: int | None) -> dict[str, tuple[Verdict, str]]:
        monkeypatch.setattr(_diagnosis, "_version", lambda name: installed.get(name, ""))
        monkeypatch.setitem(sys.modules, "nixl_meta_utils", SimpleNamespace(detect_cuda_major=lambda: cuda))
        return {check.what: (check.verdict, check.hint) for check in NixlBackend.diagnose(Options())}

    fine = say({"nixl": "1.5.1", "nixl-cu12": "1.5.1"}, 12)
    assert {verdict for verdict, _ in fine.values()} == {Verdict.OK}
    trap = say({"nixl": "1.5.1", "nixl-cu12": "1.5.1"}, 13)
    assert trap["build for CUDA"] == (Verdict.PROBLEM, "pip install nixl-cu13==1.5.1")
    assert say({"nixl": "1.5.1"}, None)["packages"][0] is Verdict.PROBLEM
    assert say({"nixl": "1.5.1", "nixl-cu12": "1.4.0"}, None)["packages"] == (
        Verdict.PROBLEM,
        "pip install nixl-cu12==1.5.1",
    )
    assert say({}, None)["packages"][0] is Verdict.PROBLEM
