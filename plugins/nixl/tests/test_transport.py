"""Which transport carries the bytes: what UCX may use, what is left of it, and what a real probe tells."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from plugins.nixl.tests import stub
from plugins.nixl.tests.test_package import needs_nixl
from tests.helpers.backend_peer import Memory, Peer, make
from tests.helpers.ports import consecutive_ports, own_ports

from statelink.backend import BackendContext, Batch, Blocks, Region, Verdict
from statelink.errors import TransferError
from statelink.testing import bare_machine
from statelink_nixl import NixlBackend, Options

if TYPE_CHECKING:
    from pathlib import Path

ALL = frozenset({"rdma", "tcp", "shm", "cuda_ipc"})
RDMA, BOOT = "sys/class/infiniband/mlx5_0/ports/1/state", "proc/sys/kernel/random/boot_id"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A machine with nothing, but for what a test puts there."""
    with bare_machine(tmp_path):
        yield tmp_path


def put(machine: Path, name: str, text: str = "") -> None:
    (machine / name).parent.mkdir(parents=True, exist_ok=True)
    (machine / name).write_text(text)


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
def test_what_a_setting_leaves(machine: Path, setting: str, may: frozenset[str]) -> None:
    put(machine, RDMA, "4: ACTIVE")
    put(machine, "dev/nvidiactl")
    assert NixlBackend.transports(Options(ucx={"TLS": setting})) == may


def test_devices_and_other_backends_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert NixlBackend.transports(Options()) == {"tcp", "shm"}
    put(machine, RDMA, "4: ACTIVE")
    assert NixlBackend.transports(Options()) == {"tcp", "shm", "rdma"}
    monkeypatch.setenv("UCX_TLS", "rc")
    assert NixlBackend.transports(Options()) == {"rdma"}
    assert NixlBackend.transports(Options(ucx={"TLS": "tcp"})) == {"tcp"}
    assert not NixlBackend.transports(Options(backends={"LIBFABRIC": {}}))


@needs_nixl
@pytest.mark.parametrize(
    ("tls", "near", "kind", "over_tcp", "word"),
    [
        ("rc", True, "dram", None, "rdma"),
        ("rc,tcp,sm", False, "dram", None, "unknown"),
        ("rc,tcp,sm", False, "dram", False, "rdma"),
        ("rc,tcp,sm", False, "dram", True, "tcp"),
        ("rc,tcp,sm", True, "dram", False, "unknown"),
        ("tcp,sm", True, "dram", False, "shm"),
        ("rc,tcp", False, "cuda:0", False, "unknown"),  # there is no memory of a card for a first write
        ("tcp,cuda", True, "cuda:0", None, "unknown"),
        ("tcp,cuda,sm", False, "cuda:0", None, "tcp"),
    ],
)
def test_what_is_left(
    machine: Path, monkeypatch: pytest.MonkeyPatch, tls: str, near: bool, kind: str, over_tcp: bool | None, word: str
) -> None:
    """Of what may carry bytes, by where the peer is, by the memory, and by what the kernel saw of the first bytes."""
    put(machine, RDMA, "4: ACTIVE")
    put(machine, "dev/nvidiactl")
    agent, regions = stub.installed(monkeypatch), (Region(4096, 10, kind),)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client, server = socket.create_connection(listener.getsockname()), listener.accept()[0]
    with client, server:

        def carry(nbytes: int) -> None:
            for _ in range(0, nbytes, 4096):
                client.sendall(bytes(4096))
                server.recv(4096, socket.MSG_WAITALL)

        if over_tcp:
            monkeypatch.setattr(agent, "carry", staticmethod(carry))
        options = {"ucx": {"TLS": tls}, "connect_timeout": 0 if over_tcp is None else 30}
        here, there = make(NixlBackend, "here", options), make(NixlBackend, "there", options)
        here.register(regions)
        put(machine, BOOT, "one host")
        descriptor = there.descriptor()
        put(machine, BOOT, "one host" if near else "another")
        here.connect("there", descriptor, regions)
        assert isinstance(here, NixlBackend)
        assert here.transport("there") == word


@needs_nixl
@pytest.mark.parametrize(
    ("tls", "kind", "prompt"),
    [
        ("all", "dram", True),
        ("rc,cuda_copy", "cuda:0", True),  # a network card reads the memory itself
        ("tcp,cuda_copy", "cuda:0", False),
        ("all", "cuda:0", False),  # nobody knows
    ],
)
def test_what_may_be_slow_is_not_posted_where_messages_wait(
    machine: Path, monkeypatch: pytest.MonkeyPatch, tls: str, kind: str, prompt: bool
) -> None:
    """Bytes of a card that UCX copies through the host, piece by piece, keep the thread that posts them."""
    put(machine, RDMA, "4: ACTIVE")
    put(machine, "dev/nvidiactl")
    stub.installed(monkeypatch)
    regions = (Region(4096, 10, kind),)
    backend = stub.pair(regions, regions, {"ucx": {"TLS": tls}, "connect_timeout": 0})
    declared = NixlBackend.capabilities.prompt_bytes
    assert declared > 0
    assert backend.prompt_bytes_to("far") == (declared if prompt else 0)


@needs_nixl
def test_a_required_transport_holds_between_any_two_kinds_of_memory(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two hosts' memories one transport is left, and between two cards of a host two are."""
    put(machine, RDMA, "4: ACTIVE")
    put(machine, "dev/nvidiactl")
    agent, regions = stub.installed(monkeypatch), (Region(4096, 4096), Region(12288, 4096, "cuda:0"))
    options = Options(ucx={"TLS": "rc,cuda"}, connect_timeout=0)
    near = NixlBackend(BackendContext(options=options, link="near", require=frozenset({"rdma"})))
    far = make(NixlBackend, "far", {"ucx": {"TLS": "rc,cuda"}, "connect_timeout": 0})
    near.register(regions)
    near.connect("far", far.descriptor(), regions)

    def batch(address: int, region: int) -> Batch:
        place, one = np.array([address], np.uint64), np.array([1], np.uint64)
        at = np.array([region], np.uint32)
        return Batch(Blocks(place, place.copy(), one, at, at.copy()), 1, 1)

    assert near.submit("far", batch(4096, 0)).outcome is not None
    moved = len(agent.moved)
    with pytest.raises(TransferError, match=r"rdma is required, and from VRAM here to VRAM there it is unknown"):
        near.submit("far", batch(12288, 1))
    assert len(agent.moved) == moved


@needs_nixl
@pytest.mark.parametrize(
    ("tls", "word"),
    [
        ("tcp", "tcp"),  # named
        ("sm,tcp,self", "shm"),  # probed: the kernel saw nothing
        ("^posix,sysv,cma,xpmem,knem", "tcp"),  # probed: all of the ways within a host are off, one by one
    ],
)
def test_a_real_peer(tls: str, word: str) -> None:
    options = {"ucx": {"TLS": tls}}
    peer = Peer(NixlBackend, "far", [[4096]], options)
    memory = Memory([[4096]])
    backend = make(NixlBackend, "near", options)
    try:
        backend.register(memory.regions)
        peer.ready().meet("near", backend.descriptor(), memory.regions)
        backend.connect("far", peer.descriptor, peer.regions)
        assert isinstance(backend, NixlBackend)
        assert backend.transport("far") == word
        assert backend.transport("nobody") == "unknown"
    finally:
        backend.close()
        peer.kill()


@needs_nixl
def test_the_ports_at_which_ucx_accepts_data_can_be_bounded() -> None:
    ports = consecutive_ports(100)
    before = own_ports()
    backend = make(NixlBackend, "near", {"ucx": {"TLS": "tcp", "TCP_PORT_RANGE": f"{ports[0]}-{ports[-1]}"}})
    try:
        opened = own_ports() - before
        assert 0 < len(opened) < len(ports) / 3, "UCX draws ports at random, and few are taken"
        assert opened <= set(ports)
    finally:
        backend.close()


def test_the_packages_of_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(installed: dict[str, str], cuda: int | None) -> dict[str, tuple[Verdict, str]]:
        def version(name: str) -> str:
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setitem(sys.modules, "nixl_meta_utils", SimpleNamespace(detect_cuda_major=lambda: cuda))
        return {check.what: (check.verdict, check.hint) for check in NixlBackend.diagnose(Options())}

    fine = say({"nixl": "1.5.1", "nixl-cu12": "1.5.1"}, 12)
    assert fine["packages"][0] is fine["build for CUDA"][0] is Verdict.OK
    trap = say({"nixl": "1.5.1", "nixl-cu12": "1.5.1"}, 13)
    assert trap["build for CUDA"] == (Verdict.PROBLEM, "pip install nixl-cu13==1.5.1")
    assert say({"nixl": "1.5.1"}, None)["packages"][0] is Verdict.PROBLEM
    assert say({"nixl": "1.5.1", "nixl-cu12": "1.4.0"}, None)["packages"] == (
        Verdict.PROBLEM,
        "pip install nixl-cu12==1.5.1",
    )
    # 1.5.2 is on the package index as the front alone.
    newer = {"nixl": "1.5.2", "nixl-cu12": "1.5.1"}
    assert say(newer, None)["packages"] == (Verdict.PROBLEM, "pip install nixl==1.5.1")
    assert say(newer, 13)["build for CUDA"] == (Verdict.PROBLEM, "pip install nixl==1.5.1 nixl-cu13==1.5.1")
    assert say({}, None)["packages"][0] is Verdict.PROBLEM
