"""What can be told of the backend without a peer: its declaration, its options, and every answer of its probe."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from plugins.mori.tests.world import PACKAGE, REAL, changes_the_card
from tests.helpers.backend_peer import make

from statelink.backend import (
    UNKNOWN,
    Backend,
    BackendContext,
    Batch,
    Blocks,
    Region,
    Verdict,
    unpack_descriptors,
)
from statelink.errors import BackendUnavailableError, TransferError
from statelink.testing import bare_machine
from statelink_conformance import PackageTests
from statelink_mori import MoriBackend, Options


class TestPackage(PackageTests):
    backend = "mori"
    library = ("mori",)
    probes_elsewhere = True
    refused_options = [
        {"transport": "RDMA"},
        {"backends": {}},
        {"backends": {"FABRIC": {}}},
        {"backends": {"TCP": {}}},
        {"backends": {"RDMA": {"enable_notification": True}}},
        {"backends": {"RDMA": {"qp_per_transfer": [1]}}},
        {"backends": {"RDMA": {"qp_per_transfer": 0}}},
        {"backends": {"RDMA": {"poll_cq_mode": "EVENT"}}},
        {"backends": {"XGMI": {}, "RDMA": {"poll_cq_mode": "event"}}},
        {"port": 1},
        {"port": 65536},
    ]


needs_the_library = pytest.mark.usefixtures("library")


def of(**options: Any) -> Options:
    return msgspec.convert(options, Options)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with nothing, but for what a test puts there; first on its path is ``packages``."""
    real = importlib.util.find_spec

    def find(name: str, *arguments: Any) -> Any:
        if name in ("mori", "torch"):
            return importlib.machinery.PathFinder.find_spec(name, [str(tmp_path / "packages")])
        return real(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    with bare_machine(tmp_path):
        yield tmp_path


def put(machine: Path, name: str, text: str = "") -> None:
    (machine / name).parent.mkdir(parents=True, exist_ok=True)
    (machine / name).write_text(text)


NODES = "sys/class/kfd/kfd/topology/nodes"
NEEDS = {
    "RDMA": "RDMA needs an AMD GPU (for host memory, too), and the driver lists 0",
    "XGMI": "XGMI needs 2 AMD GPUs, and the driver lists 0",
}


@pytest.mark.parametrize("transport", ["RDMA", "XGMI"])
def test_machine_without_anything(machine: Path, transport: str) -> None:
    probe = MoriBackend.probe(of(backends={transport: {}}))
    assert not probe.ok
    rdma = transport == "RDMA"
    clauses = [
        f"MoRI is not installed. For {transport}, this machine lacks: the Python package mori is not installed "
        "(its distribution is amd-mori, with wheels for CPython 3.10)",
        "the Python package torch is not installed, and mori imports it",
        *(["librocm_smi64.so.1 cannot be loaded", "libibverbs.so.1 cannot be loaded"] if rdma else []),
        f"there is no {machine / 'dev/kfd'}: no AMD GPU, or its driver is not loaded or not visible here",
        NEEDS[transport],
        *(["no RDMA port is active"] if rdma else []),
    ]
    assert probe.reason.split("; ") == clauses
    assert probe.hint.startswith("pip install 'statelink-mori[rocm]'")
    assert probe.details == {"gpus": "none", "active RDMA ports": "none"}
    with pytest.raises(BackendUnavailableError, match="MoRI is not installed"):
        MoriBackend(BackendContext(options=of(backends={transport: {}}), link="x"))


def put_everything(machine: Path) -> None:
    """All but an active port and a MoRI that starts."""
    put(machine, "packages/mori/__init__.py", "import sys; sys.exit('it said so')")
    for name in ("packages/torch/__init__.py", "lib/librocm_smi64.so.1", "lib/libibverbs.so.1"):
        put(machine, name)
    put(machine, "dev/kfd")
    for number, identity in enumerate(["0", "5056"]):
        put(machine, f"{NODES}/{number}/gpu_id", f"{identity}\n")


def test_machine_that_lacks_one_thing(machine: Path) -> None:
    put_everything(machine)
    put(machine, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    put(machine, "sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    probe = MoriBackend.probe(Options())
    said = "MoRI does not start here: it said so (exit status 1). For RDMA, this machine lacks: nothing that is known"
    assert (probe.reason, probe.hint) == (said, "choose another backend")
    assert probe.details == {"gpus": "1", "active RDMA ports": "mlx5_0/1"}
    put(machine, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    probe = MoriBackend.probe(Options())
    assert probe.reason.endswith("this machine lacks: no RDMA port is active")


@pytest.mark.usefixtures("machine")
def test_probe_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[Path]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "glob", broken)
    probe = MoriBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, "looking for what MoRI needs failed: OSError: the disk is gone")


def test_diagnosis(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XGMI starts without a GPU, and serves nothing: the probe succeeds then, and this says why nothing will move."""
    for name in ("packages/mori/__init__.py", "packages/torch/__init__.py", "dev/kfd"):
        put(machine, name)
    monkeypatch.delenv("MORI_IO_ENABLE_NOTIFICATION", raising=False)
    xgmi = of(backends={"XGMI": {}})
    (needs, environment) = MoriBackend.diagnose(xgmi)
    assert (needs.verdict, needs.found) == (Verdict.PROBLEM, NEEDS["XGMI"])
    assert environment.verdict is Verdict.OK
    for number in range(2):
        put(machine, f"{NODES}/{number}/gpu_id", "5056\n")
    monkeypatch.setenv("MORI_IO_ENABLE_NOTIFICATION", "1")
    (needs, environment) = MoriBackend.diagnose(xgmi)
    assert (needs.verdict, needs.found) == (Verdict.OK, "all that XGMI needs; GPUs: 2")
    assert (environment.verdict, environment.hint) == (Verdict.PROBLEM, "unset MORI_IO_ENABLE_NOTIFICATION")


@needs_the_library
@pytest.mark.parametrize(
    ("value", "harms"), [("1", True), ("event", True), ("EVENT", True), ("0", False), ("polling", False)]
)
def test_event_polling_by_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, harms: bool) -> None:
    """It wins over the options, and closes standard input: no engine is started, and it is diagnosed."""
    monkeypatch.delenv("MORI_IO_ENABLE_NOTIFICATION", raising=False)
    monkeypatch.setenv("MORI_IO_POLL_CQ_MODE", value)
    found = [each for each in MoriBackend.diagnose(Options()) if each.what == "environment"]
    said = (
        f"MORI_IO_POLL_CQ_MODE={value} wins over this plugin: the library then closes file descriptor 0, and whoever "
    )
    assert [each.verdict for each in found] == [Verdict.PROBLEM if harms else Verdict.OK]
    assert (found[0].found.startswith(said), found[0].hint == "unset MORI_IO_POLL_CQ_MODE") == (harms, harms)
    probe = MoriBackend.probe(Options())
    assert (probe.ok, probe.reason.startswith(said)) == (not harms, harms)


@needs_the_library
def test_event_polling_is_of_rdma_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_IO_POLL_CQ_MODE", "event")
    assert MoriBackend.probe(of(backends={"XGMI": {}})).ok


@needs_the_library
@changes_the_card
@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ({}, {"MORI_SIM_GPUS": "0"}, r"does not start here: .* 0 GPUs \(exit status 255\)"),
        ({}, {"MORI_SIM_PORTS": "0"}, r"RuntimeError: no active RDMA device on this host.*\(exit status 1\)"),
        (
            {"backends": {"RDMA": {"pigeons": 1}}},
            {},
            r"TypeError: __init__\(\): incompatible constructor arguments\. .*Invoked with: kwargs: pigeons=1",
        ),
        (
            {"backends": {"RDMA": {"enable_transfer_chunking": True, "chunk_bytes": 100}}},
            {},
            "RuntimeError: Invalid RDMA config: chunkBytes must be >= 4096 when chunking is enabled",
        ),
        (
            {},
            {"MORI_SIM_GPUS": "2", "MORI_SIM_PORTS": "0", "MORI_DISABLE_AUTO_XGMI": "0"},
            "no RDMA port is active, and MORI_DISABLE_AUTO",
        ),
    ],
)
def test_every_way_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], environment: dict[str, str], said: str
) -> None:
    """Some of them end the process that the library is in; it is not this one."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    lacks = "this machine lacks: .*no RDMA port is active"
    with bare_machine(tmp_path), pytest.raises(BackendUnavailableError, match=rf"{said}.*{lacks}"):
        make(MoriBackend, "nobody", options)


@needs_the_library
def test_library_that_cannot_be_imported_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine started in the other process; in this one something is in the way."""
    monkeypatch.setitem(sys.modules, "mori.io", None)
    with pytest.raises(BackendUnavailableError, match=r"cannot be imported here .*: import of mori\.io halted"):
        make(MoriBackend, "nobody")


@pytest.mark.skipif(not REAL, reason="no wheel of MoRI is installed, whose files say what they need")
def test_wheel_without_its_libraries(machine: Path) -> None:
    """The loader is asked for all of them: those of ROCm, of the PCI bus, and of a release of gRPC."""
    copied = machine / "packages/mori"
    copied.mkdir(parents=True)
    for each in PACKAGE.glob("*.so"):
        if not each.is_symlink():
            shutil.copy(each, copied)
    put(machine, "packages/mori/__init__.py", "import mori.libmori_pybinds")
    importlib.invalidate_caches()
    reason = MoriBackend.probe(of(backends={"XGMI": {}})).reason
    for name in ("libamdhip64.so.7", "libhsa-runtime64.so.1", "libpci.so.3", "libprotobuf.so.23", "libgrpc++.so.1"):
        assert f"; {name} cannot be loaded" in reason


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.2.1", "this is mori 1.2.1, which waits for ever for a peer"),
        (
            "1.2.4",
            "this version of mori.io has no IOEngine.deregister_memory, IOEngine.create_session, IOEngineSession.",
        ),
    ],
)
def test_library_that_is_too_old(machine: Path, version: str, said: str) -> None:
    """By its version, or by the names that it lacks."""
    put(machine, "packages/mori/__init__.py", f"__version__ = {version!r}")
    has = "create_backend = get_engine_desc = register_memory = register_remote_engine = deregister_remote_engine = 1"
    put(machine, "packages/mori/io.py", f"class IOEngine:\n    {has}")
    reason = MoriBackend.probe(Options()).reason
    assert reason.startswith(f"MoRI does not start here: ImportError: {said}")
    assert "; this plugin needs amd-mori 1.2.2 (exit status 1). For RDMA, " in reason


def test_library_that_aborts(machine: Path) -> None:
    put(machine, "packages/mori/__init__.py", "import os; print('Assertion failed', flush=True); os.abort()")
    assert MoriBackend.probe(Options()).reason.startswith("MoRI does not start here: Assertion failed (SIGABRT)")


# Starting and registering


@needs_the_library
def test_probe_that_succeeds() -> None:
    probe = MoriBackend.probe(Options())
    assert probe.ok, probe.reason
    assert probe.reason == f"{probe.details['library']} with RDMA"
    assert probe.details["library"].startswith("mori ")


@needs_the_library
def test_busy_ports_and_bad_hosts() -> None:
    """The library would end the process, or listen somewhere else."""
    busy = socket.create_server(("127.0.0.1", 0))
    with busy, pytest.raises(BackendUnavailableError, match="Address already in use"):
        make(MoriBackend, "nobody", {"port": busy.getsockname()[1]})
    for host in ("::1", "localhost", "", "0.0.0.0"):
        with pytest.raises(BackendUnavailableError, match=r"could not be started.*(Address|not reach)(.|\n)*IPv4 only"):
            MoriBackend(BackendContext(options=Options(), link="nobody", host=host))


def engine_of(backend: Backend) -> Any:
    """What the library's descriptor says of an engine."""
    io: Any = importlib.import_module("mori.io")
    return io.EngineDesc.unpack(unpack_descriptors(backend.descriptor(), nested=True)[1][0])


@needs_the_library
def test_a_port_of_ones_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    backend = make(MoriBackend, "fixed", {"port": port})
    assert engine_of(backend).port == port
    backend.close()


@needs_the_library
def test_keys_are_of_one_incarnation() -> None:
    """What a NIC elsewhere remembers of a key must not meet another process."""
    keys = set()
    for _ in range(2):
        backend = make(MoriBackend, "same")
        keys.add(engine_of(backend).key)
        backend.close()
        with pytest.raises(TransferError, match="the backend is closed"):
            backend.descriptor()
    assert len(keys) == 2
    assert all(key.startswith("same-") for key in keys)


@needs_the_library
def test_regions_that_cannot_be_registered() -> None:
    array = np.zeros(100, np.uint8)
    good = Region(array.ctypes.data, 100, "cuda:1")
    backend = make(MoriBackend, "register", {"backends": {"XGMI": {}}})
    with pytest.raises(TransferError, match="kind 'npu:0' is unknown to MoRI"):
        backend.register((good, Region(1, 1, "npu:0")))
    with pytest.raises(TransferError, match=r"region 1 could not be registered.*100 bytes of dram.*GPUs only"):
        backend.register((good, Region(array.ctypes.data, 100)))
    backend.close()


# Sessions and batches

NUMBER, NUMA_NODE = 1, 8
"""Where the library's packed descriptor of a memory has them."""


@pytest.fixture
def sessions(library: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    found = Sessions(importlib.import_module("mori.io"), monkeypatch)
    yield found
    found.close()


class Sessions:
    """A pair of backends, and the library's sessions between them, which write down what they are told."""

    def __init__(self, io: Any, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, Any]] = []
        self.moved: list[tuple[int, int, tuple[Any, ...]]] = []
        patch.setattr(io.IOEngine, "create_session", lambda engine, near, far: self.session(near, far))
        patch.setattr(io.IOEngine, "register_remote_engine", lambda engine, far: None)
        self.backends: list[Backend] = []

    def session(self, near: Any, far: Any) -> Any:
        self.made.append((near, far))
        ended = SimpleNamespace(Failed=lambda: False, Succeeded=lambda: True)

        def write(*blocks: Any) -> Any:
            self.moved.append((near.data, far.data, blocks[:3]))
            return ended

        return SimpleNamespace(allocate_transfer_uid=int, batch_write=write)

    def connect(self, near: list[Region], far: list[Region], options: dict[str, Any] | None = None) -> Backend:
        self.backends = [make(MoriBackend, "near", options), make(MoriBackend, "far", options)]
        for backend, regions in zip(self.backends, (near, far), strict=True):
            backend.register(regions)
        self.backends[0].connect("far", self.backends[1].descriptor(), far)
        return self.backends[0]

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


def test_each_pair_of_regions_is_a_batch_of_its_own(sessions: Sessions) -> None:
    """With offsets in the regions."""
    high = (1 << 64) - 4096
    backend = sessions.connect([Region(high, 4096), Region(4096, 4096)], [Region(8192, 4096), Region(12288, 4096)])
    blocks = Blocks(
        np.array([high + 1, 4100, high, 4096], np.uint64),
        np.array([8193, 8192, 12288, 8200], np.uint64),
        np.array([1, 2, 4096, 5], np.uint64),
        np.array([0, 1, 0, 1], np.uint32),
        np.array([0, 0, 1, 0], np.uint32),
    )
    wanted = [(high, 8192, ([1], [1], [1])), (high, 12288, ([0], [0], [4096])), (4096, 8192, ([4, 0], [0, 8], [2, 5]))]
    assert backend.submit("far", Batch(blocks, 1, 1)).outcome == (True, "", True)
    assert sessions.moved == wanted


@pytest.mark.parametrize(
    ("backends", "auto", "apart", "kinds", "word"),
    [
        (["RDMA"], None, False, ["cuda:0"], "rdma"),
        (["RDMA"], "0", False, ["cuda:0"], UNKNOWN),
        (["RDMA"], "0", False, ["dram"], "rdma"),
        (["RDMA"], "1", False, ["cuda:0"], "rdma"),
        (["XGMI"], None, False, ["cuda:0"], "xgmi"),
        (["XGMI", "RDMA"], None, False, ["dram", "cuda:0"], UNKNOWN),
        (["XGMI", "RDMA"], None, True, ["cuda:0"], "rdma"),
    ],
)
def test_the_transport_that_is_left(
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    backends: list[str],
    auto: str | None,
    apart: bool,
    kinds: list[str],
    word: str,
) -> None:
    monkeypatch.delenv("MORI_DISABLE_AUTO_XGMI", raising=False)
    if auto is not None:
        monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", auto)
    if apart:
        nodes = itertools.count()
        io: Any = importlib.import_module("mori.io")
        monkeypatch.setattr(io.EngineDesc, "node_id", property(lambda _: str(next(nodes))))
    options: dict[str, Any] = {"backends": {name: {} for name in backends}}
    regions = [Region(4096 * number, 64, kind) for number, kind in enumerate(kinds, 1)]
    backend = sessions.connect(regions, regions, options)
    assert isinstance(backend, MoriBackend)
    assert backend.transport("far") == word
    assert {word} - {UNKNOWN} <= MoriBackend.transports(of(**options))


@pytest.mark.parametrize(("local", "remote", "count"), [(3, 5, 5), (200, 200, 200), (0, 1, 0), (1, 0, 0)])
def test_sessions_that_cover_all_memories(sessions: Sessions, local: int, remote: int, count: int) -> None:
    near, far = ([Region(4096 * number, 64) for number in range(1, many + 1)] for many in (local, remote))
    sessions.connect(near, far)
    assert len(sessions.made) == count
    if count:
        for number, regions in enumerate((near, far)):
            assert {pair[number].data for pair in sessions.made} == {each.address for each in regions}


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (["cuda:0", "cuda:1"] * 2, ["dram", "cuda:0", "dram"]),
        (["dram"] * 4, ["dram"] * 3),
        (["cuda:0", "cuda:0", "dram"], ["cuda:0", "dram"]),
    ],
)
def test_sessions_that_cover_all_places(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, local: list[str], remote: list[str]
) -> None:
    """Devices, the host, and NUMA nodes, all of which the library keeps connections by."""
    io: Any = importlib.import_module("mori.io")
    real = io.IOEngine.register_memory

    def register_memory(engine: Any, *memory: Any) -> Any:
        """This machine has one NUMA node, so two are dealt out."""
        values = msgspec.msgpack.decode(real(engine, *memory).pack())
        values[NUMA_NODE] = values[NUMBER] % 2
        return io.MemoryDesc.unpack(msgspec.msgpack.encode(values))

    monkeypatch.setattr(io.IOEngine, "register_memory", register_memory)
    sides = [[Region(4096 * number, 64, kind) for number, kind in enumerate(kinds, 1)] for kinds in (local, remote)]
    sessions.connect(sides[0], sides[1])
    places = [
        {(kind.partition(":")[0], kind.partition(":")[2], number % 2) for number, kind in enumerate(kinds)}
        for kinds in (local, remote)
    ]
    found = {tuple((each.loc, each.device_id, each.numa_node) for each in pair) for pair in sessions.made}
    assert len(found) == len(places[0]) * len(places[1])
