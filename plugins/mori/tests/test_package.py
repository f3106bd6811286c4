"""What can be told of the backend without a peer: its declaration, its options, and every answer of its probe."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from plugins.mori.tests.peer import make
from tests.helpers.availability import environment_of

from statelink.backend import (
    UNKNOWN,
    BackendContext,
    Batch,
    Blocks,
    Ends,
    Op,
    Region,
    RegionTable,
    Verdict,
)
from statelink.errors import BackendUnavailableError, TransferError
from statelink.testing import PackageTests
from statelink_mori import MoriBackend, Options, _backend, _machine
from statelink_mori._tables import Offer, covering, parts_of

if TYPE_CHECKING:
    from pathlib import Path


class TestPackage(PackageTests):
    backend = "mori"
    library = ("mori",)
    environment = environment_of("mori")
    probes_elsewhere = True
    refused_options = [
        {"transport": "RDMA"},
        {"backends": {}},
        {"backends": {"FABRIC": {}}},
        {"backends": {"RDMA": {}, "TCP": {}}},
        {"backends": {"RDMA": {"enable_notification": True}}},
        {"backends": {"RDMA": {"qp_per_transfer": [1]}}},
        {"backends": {"RDMA": {"poll_cq_mode": "EVENT"}}},
        {"backends": {"XGMI": {}, "RDMA": {"poll_cq_mode": "event"}}},
        {"port": 1},
        {"port": 65536},
    ]


def of(**options: Any) -> Options:
    return msgspec.convert(options, Options)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing, but for what a test puts there."""
    for name in ("KFD", "NODES"):
        monkeypatch.setattr(_machine, name, tmp_path / name)
    monkeypatch.setattr(_machine, "rdma_devices", dict)
    monkeypatch.setattr(_machine, "loads", lambda name: (tmp_path / name).exists())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: (tmp_path / name).exists() or None)
    monkeypatch.setattr(_backend, "_started", {})
    return tmp_path


def put(machine: Path, name: str, text: str = "") -> None:
    (machine / name).parent.mkdir(parents=True, exist_ok=True)
    (machine / name).write_text(text)


NEEDS = {
    "RDMA": "RDMA needs an AMD GPU (for host memory, too), and the driver lists 0",
    "XGMI": "XGMI needs 2 AMD GPUs, and the driver lists 0",
}


@pytest.mark.parametrize("transport", ["RDMA", "XGMI", "TCP"])
def test_machine_without_anything(machine: Path, transport: str) -> None:
    probe = MoriBackend.probe(of(backends={transport: {}}))
    assert not probe.ok
    rdma, gpus = transport == "RDMA", transport != "TCP"
    clauses = [
        f"MoRI is not installed. For {transport}, this machine lacks: the Python package mori is not installed "
        "(it is on no package index: build it from ROCm/mori)",
        "the Python package torch is not installed, and mori imports it",
        "libamdhip64.so cannot be loaded",
        *(["librocm_smi64.so cannot be loaded", "libibverbs.so.1 cannot be loaded"] if rdma else []),
        *([f"there is no {machine / 'KFD'}: no AMD GPU, or its driver is not loaded or not visible here"] * gpus),
        *([NEEDS[transport]] if gpus else []),
        *(["no RDMA port is active"] if rdma else []),
    ]
    assert probe.reason.split("; ") == clauses
    assert probe.details == {"gpus": "none", "active RDMA ports": "none"}
    with pytest.raises(BackendUnavailableError, match="MoRI is not installed"):
        MoriBackend(BackendContext(options=of(backends={transport: {}}), link="x"))


def test_machine_that_lacks_one_thing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mori", "torch", "librocm_smi64.so", "libamdhip64.so", "libibverbs.so.1", "KFD"):
        put(machine, name)
    for number, identity in enumerate(["0", "5056"]):
        put(machine, f"NODES/{number}/gpu_id", f"{identity}\n")
    monkeypatch.setattr(_machine, "rdma_devices", lambda: {"mlx5_0": ["1"], "mlx5_1": []})
    monkeypatch.setattr(_backend, "trial", lambda options: (False, "it said so"))
    probe = MoriBackend.probe(Options())
    assert probe.reason == "it said so. For RDMA, this machine lacks: nothing that is known"
    assert probe.hint == "choose another backend"
    assert probe.details == {"gpus": "1", "active RDMA ports": "mlx5_0/1"}
    monkeypatch.setattr(_machine, "rdma_devices", lambda: {"mlx5_0": []})
    probe = MoriBackend.probe(Options())
    assert probe.reason.endswith("this machine lacks: no RDMA port is active")


def test_probe_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(_backend, "gpus", broken)
    probe = MoriBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, "looking for what MoRI needs failed: OSError: the disk is gone")


def test_diagnosis(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XGMI starts without a GPU, and serves nothing: the probe succeeds then, and this says why nothing will move."""
    for name in ("mori", "torch", "libamdhip64.so", "KFD"):
        put(machine, name)
    monkeypatch.delenv("MORI_IO_ENABLE_NOTIFICATION", raising=False)
    xgmi = of(backends={"XGMI": {}})
    (needs, environment) = MoriBackend.diagnose(xgmi)
    assert (needs.verdict, needs.found) == (Verdict.PROBLEM, NEEDS["XGMI"])
    assert environment.verdict is Verdict.OK
    for number in range(2):
        put(machine, f"NODES/{number}/gpu_id", "5056\n")
    monkeypatch.setenv("MORI_IO_ENABLE_NOTIFICATION", "1")
    (needs, environment) = MoriBackend.diagnose(xgmi)
    assert (needs.verdict, needs.found) == (Verdict.OK, "all that XGMI needs; GPUs: 2")
    assert (environment.verdict, environment.hint) == (Verdict.PROBLEM, "unset MORI_IO_ENABLE_NOTIFICATION")


@pytest.mark.parametrize(
    ("value", "harms"), [("1", True), ("event", True), ("EVENT", True), ("0", False), ("polling", False)]
)
def test_event_polling_by_the_environment(
    machine: Path, monkeypatch: pytest.MonkeyPatch, value: str, harms: bool
) -> None:
    """It wins over the options, and closes standard input: no engine is started, and it is diagnosed."""
    monkeypatch.delenv("MORI_IO_ENABLE_NOTIFICATION", raising=False)
    monkeypatch.setenv("MORI_IO_POLL_CQ_MODE", value)
    monkeypatch.setattr(_backend, "trial", lambda options: (True, "mori 1"))
    found = [each for each in MoriBackend.diagnose(Options()) if each.what == "environment"]
    said = (
        f"MORI_IO_POLL_CQ_MODE={value} wins over this plugin: the library then closes file descriptor 0, and whoever "
    )
    assert [each.verdict for each in found] == [Verdict.PROBLEM if harms else Verdict.OK]
    assert (found[0].found.startswith(said), found[0].hint == "unset MORI_IO_POLL_CQ_MODE") == (harms, harms)
    probe = MoriBackend.probe(Options())
    assert (probe.ok, probe.reason.startswith(said)) == (not harms, harms)
    assert MoriBackend.probe(of(backends={"TCP": {}})).ok  # only RDMA has such queues


@pytest.mark.parametrize(
    ("backends", "auto", "apart", "kinds", "word"),
    [
        (["RDMA"], None, False, ["cuda:0"], "rdma"),
        (["RDMA"], "0", False, ["cuda:0"], UNKNOWN),
        (["RDMA"], "0", False, ["dram"], "rdma"),
        (["RDMA"], "1", False, ["cuda:0"], "rdma"),
        (["XGMI"], None, True, ["cuda:0"], "xgmi"),
        (["XGMI", "RDMA"], None, False, ["dram", "cuda:0"], UNKNOWN),
        (["XGMI", "RDMA"], None, True, ["cuda:0"], "rdma"),
        (["XGMI", "TCP"], None, False, ["dram", "dram"], "tcp"),
    ],
)
def test_the_transport_that_is_left(
    monkeypatch: pytest.MonkeyPatch, backends: list[str], auto: str | None, apart: bool, kinds: list[str], word: str
) -> None:
    monkeypatch.delenv("MORI_DISABLE_AUTO_XGMI", raising=False)
    if auto is not None:
        monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", auto)
    options = of(backends={name: {} for name in backends})
    offered = Offer(SimpleNamespace(node_id="there" if apart else "here"), [], "", frozenset())
    regions = [Region(8, 8, kind) for kind in kinds]
    assert offered.transport(options, SimpleNamespace(node_id="here"), regions) == word
    assert {word} - {UNKNOWN} <= MoriBackend.transports(options)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ({}, {"MORI_SIM_GPUS": "0"}, r"does not start here: .*no GPU \(exit status 255\)"),
        ({}, {"MORI_SIM_PORTS": "0"}, r"RuntimeError: no active RDMA device on this host.*\(exit status 1\)"),
        ({"backends": {"TCP": {}}}, {}, "this MoRI has no TCP transport: mori.io has no TcpBackendConfig"),
        (
            {"backends": {"RDMA": {"pigeons": 1}}},
            {},
            r"TypeError: __init__\(\): incompatible constructor arguments\. .*Invoked with: kwargs: pigeons=1",
        ),
        ({"backends": {"RDMA": {"qp_per_transfer": 0}}}, {}, "RuntimeError: .*must be at least 1"),
        ({"backends": {"TCP": {"num_data_conns": 17}}}, {"MORI_SIM_TCP": "1"}, "ValueError: TCP numDataConns must be"),
        ({}, {"MORI_SIM_PORTS": "0", "MORI_DISABLE_AUTO_XGMI": "0"}, "no RDMA port is active, and MORI_DISABLE_AUTO"),
        (
            {},
            {"MORI_SIM_LACKS": "IOEngine.create_session,IOEngineSession.batch_read"},
            r"ImportError: this version of mori\.io has no IOEngine\.create_session, IOEngineSession\.batch_read",
        ),
    ],
)
def test_every_way_not_to_start(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], environment: dict[str, str], said: str
) -> None:
    """Some of them end the process that the library is in; it is not this one."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_backend, "missing", lambda options: ["a thing"])
    monkeypatch.setattr(_backend, "_started", {})
    with pytest.raises(BackendUnavailableError, match=rf"{said}.*this machine lacks: a thing"):
        make("nobody", options)


def test_library_that_cannot_be_imported(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's own words, from the process that tried; and from this one, where it is this one that cannot."""
    put(machine, "packages/mori/__init__.py", "raise OSError('libamdhip64.so.6: cannot open shared object file')")
    put(machine, "mori")
    monkeypatch.syspath_prepend(str(machine / "packages"))
    probe = MoriBackend.probe(Options())
    assert "not start here: OSError: libamdhip64.so.6: cannot open shared object file (exit status 1). " in probe.reason
    monkeypatch.setattr(_backend, "trial", lambda options: (True, "mori 1"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mori"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BackendUnavailableError, match=r"cannot be imported here .*: OSError: libamdhip64\.so\.6"):
        make("nobody")


@pytest.mark.usefixtures("simulated")
def test_library_that_aborts_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "TRIAL", "import os; print('Assertion failed', flush=True); os.abort()")
    assert _machine.trial(Options()) == (False, "MoRI does not start here: Assertion failed (SIGABRT)")
    monkeypatch.setattr(_machine, "TRIAL", "import time; time.sleep(60)")
    monkeypatch.setattr(_machine, "PATIENCE", 0.1)
    assert _machine.trial(Options()) == (
        False,
        "MoRI does not start here: it said nothing (it did not end within 0.1 s)",
    )


# Starting and registering


def test_probe_that_succeeds() -> None:
    probe = MoriBackend.probe(Options())
    assert probe.ok, probe.reason
    assert probe.reason == f"{probe.details['library']} with RDMA"
    assert probe.details["library"].startswith("mori ")


def test_busy_ports_and_bad_hosts() -> None:
    """The library would end the process, or listen somewhere else."""
    busy = socket.create_server(("127.0.0.1", 0))
    with busy, pytest.raises(BackendUnavailableError, match="Address already in use"):
        make("nobody", {"port": busy.getsockname()[1]})
    for host in ("::1", "localhost", "", "0.0.0.0"):
        with pytest.raises(BackendUnavailableError, match=r"could not be started.*(Address|not reach)(.|\n)*IPv4 only"):
            MoriBackend(BackendContext(options=Options(), link="nobody", host=host))


def test_a_port_of_ones_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    backend = make("fixed", {"port": port})
    engine: Any = backend._engine  # type: ignore[attr-defined]
    assert engine.desc.port == port
    del engine
    backend.close()


def test_keys_are_of_one_incarnation() -> None:
    """What a NIC elsewhere remembers of a key must not meet another process."""
    keys = set()
    for _ in range(2):
        backend = make("same")
        keys.add(backend._engine.desc.key)  # type: ignore[attr-defined]
        backend.close()
        with pytest.raises(TransferError, match="the backend is closed"):
            backend.descriptor()
    assert len(keys) == 2
    assert all(key.startswith("same-") for key in keys)


@pytest.mark.usefixtures("simulated")
def test_regions_that_cannot_be_registered() -> None:
    array = np.zeros(100, np.uint8)
    good = Region(array.ctypes.data, 100, "cuda:1")
    backend = make("register", {"backends": {"XGMI": {}}})
    with pytest.raises(TransferError, match="kind 'npu:0' is unknown to MoRI"):
        backend.register((good, Region(1, 1, "npu:0")))
    with pytest.raises(TransferError, match=r"region 1 could not be registered.*100 bytes of dram.*GPUs only"):
        backend.register((good, Region(array.ctypes.data, 100)))
    backend.close()


# Batches


def test_each_pair_of_regions_is_a_batch_of_its_own() -> None:
    """With offsets in the regions, and the near side first whichever way the bytes go."""
    high = (1 << 64) - 4096
    near = RegionTable((Region(high, 4096), Region(4096, 4096)), "mori")
    far = RegionTable((Region(8192, 4096), Region(12288, 4096)), "mori")
    blocks = Blocks(
        np.array([high + 1, 4100, high, 4096], np.uint64),
        np.array([8193, 8192, 12288, 8200], np.uint64),
        np.array([1, 2, 4096, 5], np.uint64),
        np.array([0, 1, 0, 1], np.uint32),
        np.array([0, 0, 1, 0], np.uint32),
    )
    parts = list(parts_of(Ends.of(Batch(Op.WRITE, blocks, 1, 1), near, far), near, far))
    wanted = [(0, 0, ([1], [1], [1])), (0, 1, ([0], [0], [4096])), (1, 0, ([4, 0], [0, 8], [2, 5]))]
    assert parts == wanted
    parts = list(parts_of(Ends.of(Batch(Op.READ, blocks, 1, 1), far, near), far, near))
    assert sorted(parts) == sorted((far, near, (b, a, sizes)) for near, far, (a, b, sizes) in wanted)


def memories(*places: tuple[str, int, int]) -> list[Any]:
    """Descriptors of memories by location, device and NUMA node."""
    return [SimpleNamespace(loc=loc, device_id=device, numa_node=node) for loc, device, node in places]


HOST = ("CPU", -1, 0)


@pytest.mark.parametrize(("local", "remote", "count"), [(3, 5, 5), (200, 200, 200), (0, 1, 0), (1, 0, 0)])
def test_sessions_that_cover_all_memories(local: int, remote: int, count: int) -> None:
    pairs = covering(memories(*[HOST] * local), memories(*[HOST] * remote))
    assert len(pairs) == count
    if count:
        assert {near for near, _ in pairs} == set(range(local))
        assert {far for _, far in pairs} == set(range(remote))


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        ([("GPU", number % 2, 0) for number in range(4)], [HOST, ("GPU", 0, 0), HOST]),
        ([("CPU", -1, number % 2) for number in range(4)], [HOST, ("CPU", -1, 1), ("CPU", -1, 3)]),
        ([("GPU", 0, 0), ("GPU", 0, 1), HOST], [("GPU", 0, 1), HOST]),
    ],
)
def test_sessions_that_cover_all_places(local: list[tuple[str, int, int]], remote: list[tuple[str, int, int]]) -> None:
    """Devices, the host, and NUMA nodes, all of which the library keeps connections by."""
    pairs = covering(memories(*local), memories(*remote))
    found = {(local[near], remote[far]) for near, far in pairs}
    assert found == {(near, far) for near in local for far in remote}
