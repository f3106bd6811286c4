"""The simulator of MoRI against what is known of the library: each test quotes what it stands for."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
SIMULATOR = HERE.parent
SIZE = 1 << 20
MAP_NORESERVE = 0x4000


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "mori"}
    sys.path.insert(0, str(SIMULATOR))
    yield
    sys.path.remove(str(SIMULATOR))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mori"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def io(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("MORI_SIM_TCP", "1")
    monkeypatch.setenv("MORI_SIM_HOLD", str(tmp_path / "hold"))
    return importlib.import_module("mori.io")


@pytest.fixture
def hold(tmp_path: Path, io: Any) -> Iterator[Path]:
    """No byte moves until it is removed."""
    path = tmp_path / "hold"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


class Side:
    """An engine of this process with one memory."""

    def __init__(self, io: Any, transport: str, key: str, config: Any = None, gpu: bool = False) -> None:
        self.engine = io.IOEngine(key, io.IOEngineConfig("127.0.0.1", 0))
        self.engine.create_backend(io.BackendType[transport], config)
        self.bytes = np.zeros(SIZE, np.uint8)
        self.place = io.MemoryLocationType.GPU if gpu or transport == "XGMI" else io.MemoryLocationType.CPU
        self.memory = self.register(self.bytes)

    def register(self, array: Any) -> Any:
        return self.engine.register_memory(array.ctypes.data, array.nbytes, 0, self.place)

    def knows(self, other: Side) -> Side:
        self.engine.register_remote_engine(other.engine.get_engine_desc())
        return self

    def session(self, other: Side) -> Any:
        return self.knows(other).engine.create_session(self.memory, other.memory)


@pytest.fixture
def two(io: Any) -> Callable[..., tuple[Side, Side]]:
    """Two engines of one transport, in this process."""
    return lambda transport, config=None: (Side(io, transport, "a", config), Side(io, transport, "b", config))


class Other:
    """Another process."""

    def __init__(self, io: Any, path: Path, key: str, transport: str, port: int = 0) -> None:
        path.write_bytes(bytes(SIZE))
        self.bytes = np.memmap(path, np.uint8, "r")
        environment = {**os.environ, "PYTHONPATH": str(SIMULATOR)}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "mori_process.py"), str(path), key, transport, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        answer = self._line()
        self.engine = io.EngineDesc.unpack(bytes.fromhex(answer["engine"]))
        self.memory = io.MemoryDesc.unpack(bytes.fromhex(answer["memory"]))

    def ask(self, *what: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._line()

    def session(self, side: Side) -> Any:
        side.engine.register_remote_engine(self.engine)
        return side.engine.create_session(side.memory, self.memory)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # it takes a moment

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.end()
            pytest.fail("the other process ended")
        return json.loads(line)


@pytest.fixture
def other(io: Any, tmp_path: Path) -> Iterator[Callable[..., Other]]:
    started: list[Other] = []

    def start(key: str, transport: str, port: int = 0) -> Other:
        started.append(Other(io, tmp_path / f"memory{len(started)}", key, transport, port))
        return started[-1]

    yield start
    for each in started:
        each.end()


START = (
    "import numpy as np\nfrom mori.io import *\nfrom mori.cpp import TransferStatus\n"
    "def side(kind, key, port=0, config=None):\n"
    "    engine = IOEngine(key, IOEngineConfig('127.0.0.1', port))\n"
    "    engine.create_backend(BackendType[kind], config)\n"
    "    array = np.zeros(1000, np.uint8)\n"
    "    place = MemoryLocationType.GPU if kind == 'XGMI' else MemoryLocationType.CPU\n"
    "    return engine, engine.register_memory(array.ctypes.data, 1000, 0, place), array\n"
    "def pair(kind):\n"
    "    (a, near, x), (b, far, y) = side(kind, 'a'), side(kind, 'b')\n"
    "    a.register_remote_engine(b.get_engine_desc())\n"
    "    return a, near, far, (b, x, y)\n"
)
"""How a process of `ends` begins."""


def seen(status: Any) -> tuple[str, str]:
    """How an operation ended."""
    status.Wait()
    return status.Code().name, status.Message()


def ends(code: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of a process that runs ``code`` with the simulator."""
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        env={**os.environ, "PYTHONPATH": str(SIMULATOR), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


# What exists where


def test_it_is_found_only_on_request() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import mori.io; print(mori.__file__)"],
        cwd=HERE.parents[3],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(SIMULATOR) not in done.stdout


def test_the_enumeration_names_tcp_where_the_transport_is_missing(io: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """main: only the enum value; ``from mori.io import TcpBackendConfig`` is an ImportError, create_backend says no."""
    assert hasattr(io, "TcpBackendConfig")
    monkeypatch.delenv("MORI_SIM_TCP")
    assert hasattr(io.BackendType, "TCP")
    assert not hasattr(io, "TcpBackendConfig")
    with pytest.raises(ImportError):
        exec("from mori.io import TcpBackendConfig")
    with pytest.raises(NotImplementedError, match="backend not implemented yet"):
        io.IOEngine("a", io.IOEngineConfig()).create_backend(io.BackendType.TCP)


def test_a_build_can_lack_things() -> None:
    code = "print(hasattr(IOEngine, 'create_session'), hasattr(IOEngine, 'create_backend'))"
    assert ends(code, MORI_SIM_LACKS="IOEngine.create_session") == (0, "False True\n")


def test_the_status_is_exported_elsewhere(io: Any) -> None:
    """``TransferStatus`` is not exported there: ``from mori.cpp import TransferStatus``."""
    assert not hasattr(io, "TransferStatus")
    assert importlib.import_module("mori.cpp").TransferStatus().Init()
    assert importlib.import_module("mori").__version__ == "unknown"
    assert all(hasattr(io, name) for name in io.__all__)


def test_rdma_without_an_active_port(io: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """RuntimeError (RDMA without an active port: "no active RDMA device on this host; set ...")."""
    monkeypatch.setenv("MORI_SIM_PORTS", "0")
    engine = io.IOEngine("a", io.IOEngineConfig())
    with pytest.raises(RuntimeError, match="no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0"):
        engine.create_backend(io.BackendType.RDMA)
    monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", "0")
    engine.create_backend(io.BackendType.RDMA)  # falls back to XGMI only
    assert engine.get_engine_desc().port == 1


@pytest.mark.parametrize(
    ("clause", "code", "environment", "status"),
    [
        ("librocm_smi64 reports no GPU: exit(-1)", "side('RDMA', 'a')", {"MORI_SIM_GPUS": "0"}, 255),
        ("create_backend(TCP, <any config>) on main", "side('TCP', 'a', 0, IOEngineConfig())", {}, -6),
        (
            "RDMA on a busy port: exit(-1)",
            "a = side('RDMA', 'a')[0]; side('RDMA', 'b', a.get_engine_desc().port)",
            {},
            255,
        ),
        (
            "TCP then RDMA on one engine: exit(-1)",
            "side('TCP', 'a')[0].create_backend(BackendType.RDMA)",
            {"MORI_SIM_TCP": "1"},
            255,
        ),
        (
            "unequal outer lengths: assert",
            "a, n, f, k = pair('RDMA'); a.batch_write([n], [[0]], [f], [[0]], [[1]], [0, 1])",
            {},
            -6,
        ),
        (
            "unequal inner lengths: RDMA asserts at the engine",
            "a, n, f, k = pair('RDMA'); a.batch_write([n], [[0]], [f], [[0]], [[1, 1]], [0])",
            {},
            -6,
        ),
        (
            "unequal inner lengths: XGMI asserts",
            "a, n, f, k = pair('XGMI'); a.create_session(n, f).batch_write([0], [0], [1, 1], 0)",
            {},
            -6,
        ),
        (
            "a session must not outlive its engine",
            "a, n, f, k = pair('RDMA'); s = a.create_session(n, f); del a; s.write(0, 0, 1, 0)",
            {},
            -6,
        ),
        (
            "nor remove_backend",
            "a, n, f, k = pair('RDMA'); s = a.create_session(n, f)\n"
            "a.remove_backend(BackendType.RDMA); s.write(0, 0, 1, 0)",
            {},
            -6,
        ),
        (
            "keep the status alive until it is terminal",
            "a, n, f, k = pair('RDMA'); a.create_session(n, f).write(0, 0, 1, 0)",
            {"MORI_SIM_DELAY_MS": "2000"},
            -6,
        ),
        (
            "also of one that failed while it was posted on one of several QPs: the completion of the others uses it",
            "import os\n"
            "(a, n, x), (b, f, y) = (side('RDMA', key, 0, RdmaBackendConfig(qp_per_transfer=2)) for key in 'ab')\n"
            "a.register_remote_engine(b.get_engine_desc()); s = a.create_session(n, f)\n"
            "first = s.write(0, 0, 1, 0)\n"
            "assert s.write(0, 0, 1, 1).Message().startswith('SQ is full')",
            {"MORI_SIM_DELAY_MS": "2000", "MORI_IO_QP_MAX_SEND_WR": "1", "MORI_IO_SQ_BACKOFF_TIMEOUT_US": "1000"},
            -6,
        ),
        (
            "memory that cannot be pinned: std::abort in RegisterRdmaMemoryRegionAuto",
            "a, n, f, k = pair('RDMA'); g = a.register_memory(4096, 100, -1, n.loc); print(g.size); "
            "a.create_session(g, f)",
            {},
            -6,
        ),
        (
            "as is more memory than may be pinned",
            "a, n, f, k = pair('RDMA'); a.create_session(n, f)",
            {"MORI_SIM_MEMLOCK": "999"},
            -6,
        ),
    ],
)
def test_what_ends_the_process(clause: str, code: str, environment: dict[str, str], status: int) -> None:
    found, said = ends(f"{code}\nprint('still here')", **environment)
    assert (found, "still here" in said) == (status, False), said
    assert "mori simulator: " in said


# Enumerations and configurations


def test_enumerations(io: Any) -> None:
    """Unknown 0, XGMI 1, RDMA 2, TCP 3, FABRIC 4; ...; "failed" means ``> 10``."""
    assert {each.name: int(each) for each in io.BackendType} == {
        "Unknown": 0,
        "XGMI": 1,
        "RDMA": 2,
        "TCP": 3,
        "FABRIC": 4,
    }
    assert {each.name: int(each) for each in io.MemoryLocationType} == {"Unknown": 0, "CPU": 1, "GPU": 2}
    assert {each.name: int(each) for each in io.PollCqMode} == {"POLLING": 0, "EVENT": 1}
    errors = {"ERR_INVALID_ARGS": 11, "ERR_NOT_FOUND": 12, "ERR_RDMA_OP": 13, "ERR_BAD_STATE": 14, "ERR_GPU_OP": 15}
    assert {each.name: int(each) for each in io.StatusCode} == {"SUCCESS": 0, "INIT": 1, "IN_PROGRESS": 2, **errors}


def test_configurations(io: Any) -> None:
    """kwargs allowed, all default; max_send_wr, max_cqe_num and max_msg_sge are attributes only; 1..16 connections."""
    config = io.RdmaBackendConfig(qp_per_transfer=2, poll_cq_mode=io.PollCqMode.EVENT)
    assert (config.qp_per_transfer, config.post_batch_size, config.enable_notification) == (2, -1, True)
    config.max_send_wr = 100
    assert config.max_send_wr == 100
    for wrong in ({"max_send_wr": 1}, {"qp_per_transfer": "2"}, {"pigeons": 1}):
        with pytest.raises(
            TypeError, match=r"constructor arguments\. The following(.|\n)*\n\nInvoked with: kwargs: \w+="
        ):
            io.RdmaBackendConfig(**wrong)
    assert (io.XgmiBackendConfig().num_streams, io.FabricBackendConfig(num_events=3).num_events) == (64, 3)
    assert io.TcpBackendConfig().op_timeout_ms == 30000
    for count in (0, 17):
        with pytest.raises(ValueError, match=r"TCP numDataConns must be in \[1, 16\]"):
            io.TcpBackendConfig(num_data_conns=count)


def test_the_environment_wins_silently(io: Any, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment silently wins over the object. Invalid combinations raise RuntimeError from create_backend."""
    for wrong in ({"notif_per_qp": 0}, {"enable_transfer_chunking": True, "chunk_bytes": 4095}):
        with pytest.raises(RuntimeError):
            two("RDMA", io.RdmaBackendConfig(**wrong))
    two("RDMA", io.RdmaBackendConfig(notif_per_qp=0, enable_notification=False))  # then nobody looks at it
    monkeypatch.setenv("MORI_IO_ENABLE_NOTIFICATION", "0")
    a, b = two("RDMA", io.RdmaBackendConfig(enable_notification=True))
    assert seen(a.session(b).write(0, 0, 1, 7))[0] == "SUCCESS"
    assert b.engine.pop_inbound_transfer_status("a", 7) is None


def test_addresses_and_ports(io: Any) -> None:
    """The chosen port appears only after ``create_backend``; the address is advertised verbatim; TCP raises."""
    engine = io.IOEngine("a", io.IOEngineConfig(host="", port=0))
    assert engine.get_engine_desc().port == 0
    engine.create_backend(io.BackendType.RDMA)
    desc = engine.get_engine_desc()
    assert (desc.host, desc.pid) == ("", os.getpid())
    assert desc.port > 1
    with pytest.raises(RuntimeError, match="TCP: invalid listen IPv4 address"):
        io.IOEngine("b", io.IOEngineConfig("localhost")).create_backend(io.BackendType.TCP)
    with pytest.raises(RuntimeError, match="Address already in use"):
        io.IOEngine("b", io.IOEngineConfig("0.0.0.0", desc.port)).create_backend(io.BackendType.TCP)
    with pytest.raises(RuntimeError, match="Address already in use"):  # RDMA then TCP on one engine
        engine.create_backend(io.BackendType.TCP)
    engine.create_backend(io.BackendType.RDMA)  # a second one only warns
    assert engine.get_engine_desc() == desc


# Engines


def test_transfer_calls_are_positional_only(two: Any) -> None:
    """The wrapper's transfer methods are ``*args``: keyword arguments are a TypeError."""
    a, b = two("RDMA")
    session = a.session(b)
    for call in (session.write, session.read):
        with pytest.raises(TypeError):
            call(0, 0, 1, uid=0)
    with pytest.raises(TypeError):
        a.engine.write(a.memory, 0, b.memory, 0, 1, uid=0)
    with pytest.raises(TypeError):
        a.engine.batch_write([a.memory], [[0]], [b.memory], [[0]], [[1]], uids=[0])


@pytest.mark.parametrize("transport", ["RDMA", "TCP", "XGMI"])
def test_bytes_between_processes(io: Any, other: Any, transport: str) -> None:
    """Both ways, through sessions and engine-level calls; the local memory is first in both."""
    here, there = Side(io, transport, "a"), other("b", transport)
    session = there.session(here)
    here.bytes[:] = np.random.default_rng(1).integers(1, 256, SIZE, dtype=np.uint8)
    status = session.batch_write([0, 100, 5000], (7, 3000, 10), np.array([3, 2000, 1], np.uint64), 5)
    assert seen(status) == ("SUCCESS", "success" if transport == "RDMA" else "")
    wanted = np.zeros(SIZE, np.uint8)
    for near, far, size in ((0, 7, 3), (100, 3000, 2000), (5000, 10, 1)):
        wanted[far : far + size] = here.bytes[near : near + size]
    assert np.array_equal(there.bytes, wanted)
    assert seen(session.read(50_000, 2990, 2020, 6))[0] == "SUCCESS"
    assert np.array_equal(here.bytes[50_000:52_020], wanted[2990:5010])
    (first, second) = here.engine.batch_write(
        [here.memory] * 2, [[0], [9]], [there.memory] * 2, [[60_000], [60_001]], [[1], [3]], [8, 9]
    )
    assert (seen(first)[0], seen(second)[0]) == ("SUCCESS", "SUCCESS")
    assert np.array_equal(there.bytes[60_000:60_004], here.bytes[[0, 9, 10, 11]])
    assert seen(here.engine.read(here.memory, 1, there.memory, 60_001, 3, 10))[0] == "SUCCESS"
    assert np.array_equal(here.bytes[1:4], here.bytes[9:12])


@pytest.mark.parametrize("transport", ["RDMA", "XGMI"])
def test_the_target_takes_no_part(io: Any, other: Any, transport: str) -> None:
    """One-sided: a peer that is frozen is written to."""
    here, there = Side(io, transport, "a"), other("b", transport)
    session = there.session(here)
    there.stop()
    here.bytes[:] = 3
    assert seen(session.write(0, 0, SIZE, 0))[0] == "SUCCESS"
    assert (there.bytes == 3).all()


@pytest.mark.parametrize("transport", ["RDMA", "TCP", "XGMI"])
def test_bytes_move_later(two: Any, hold: Path, transport: str) -> None:
    """A call that returned has moved nothing; the status is in progress until the bytes are there."""
    a, b = two(transport)
    a.bytes[:] = 1
    status = a.session(b).write(0, 0, SIZE, 0)
    assert a.engine.wait_all([status], 0).name == "IN_PROGRESS"
    assert (status.InProgress(), status.Failed(), b.bytes.any()) == (True, False, False)
    assert status.WaitFor(20).name == "IN_PROGRESS"
    hold.unlink()
    assert seen(status)[0] == "SUCCESS"
    assert b.bytes.all()


def test_nothing_is_replayed_to_a_later_backend(io: Any, two: Any) -> None:
    """create_backend -> register_remote_engine/register_memory: neither is replayed to a backend created later."""
    _, b = two("TCP")
    engine = io.IOEngine("late", io.IOEngineConfig("127.0.0.1", 0))
    memory = engine.register_memory(b.bytes.ctypes.data, SIZE, -1, b.place)
    status = engine.write(memory, 0, b.memory, 0, 1, 0)
    assert seen(status) == ("ERR_BAD_STATE", "No available backend found, create backend first")
    engine.create_backend(io.BackendType.TCP)
    engine.register_remote_engine(b.engine.get_engine_desc())
    assert seen(engine.write(memory, 0, b.memory, 0, 1, 0)) == ("ERR_INVALID_ARGS", "TCP: invalid write request")


def test_uids(two: Any) -> None:
    """Per-engine counter from 0, shared with sessions."""
    a, b = two("RDMA")
    session = a.session(b)
    assert [a.engine.allocate_transfer_uid(), session.allocate_transfer_uid(), a.engine.allocate_transfer_uid()] == [
        0,
        1,
        2,
    ]


def test_inner_lengths(two: Any) -> None:
    """Unequal inner lengths: TCP ERR_INVALID_ARGS; RDMA on the session path ERR_INVALID_ARGS."""
    for transport in ("TCP", "RDMA"):
        a, b = two(transport)
        assert seen(a.session(b).batch_write([0], [0, 1], [1], 0))[0] == "ERR_INVALID_ARGS"
    a, b = two("TCP")
    a.knows(b)
    assert seen(a.engine.batch_write([a.memory], [[0]], [b.memory], [[0]], [[1, 1]], [0])[0])[0] == "ERR_INVALID_ARGS"


def test_sessions_that_cannot_be(io: Any, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None for an unregistered engine or what no backend serves; RuntimeError "got=0" for unknown memory."""
    a, b = two("RDMA")
    assert a.engine.create_session(a.memory, b.memory) is None
    assert seen(a.engine.write(a.memory, 0, b.memory, 0, 1, 0))[0] == "ERR_BAD_STATE"
    a.knows(b)
    b.engine.deregister_memory(b.memory)
    for call in (a.engine.create_session, lambda near, far: a.engine.write(near, 0, far, 0, 1, 0)):
        with pytest.raises(RuntimeError, match=r"remote MR size mismatch.*got=0"):
            call(a.memory, b.memory)
    x, y = Side(io, "XGMI", "x"), Side(io, "XGMI", "y", gpu=True)
    x.knows(y)
    host = x.engine.register_memory(x.bytes.ctypes.data, SIZE, -1, a.place)
    assert x.engine.create_session(host, y.memory) is None  # XGMI refuses CPU memory
    monkeypatch.setenv("MORI_SIM_GPUS", "0")
    assert x.engine.create_session(x.memory, y.memory) is None


def test_a_connection_that_nobody_answers(io: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches the remote key synchronously while holding the GIL: other Python threads stand still for all of it."""
    monkeypatch.setenv("MORI_IO_CP_TIMEOUT_MS", "700")
    importlib.import_module("mori._onesided").control_timeout.cache_clear()  # it is read once in a process
    here, there = Side(io, "RDMA", "a"), other("b", "RDMA")
    there.stop()
    stop, ticks = threading.Event(), list[float]()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    before = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ReadMessageHeader\(type\) failed .* errno=11"):
        there.session(here)
    after = time.monotonic()
    stop.set()
    thread.join()
    assert after - before > 0.6
    # It sleeps for 200 ms at a time, and between two of those, another thread may get in.
    times = [before, *(each for each in ticks if before < each < after), after]
    assert max(np.diff(times)) > 0.15
    there.process.kill()
    there.process.wait()
    with pytest.raises(RuntimeError, match=r"connect\(127\.0\.0\.1:\d+\): Connection refused"):
        there.session(here)
    importlib.import_module("mori._onesided").control_timeout.cache_clear()


def test_wait_all(two: Any, hold: Path) -> None:
    """Empty -> SUCCESS; any error -> first error; timeout -> IN_PROGRESS; never raises."""
    a, b = two("RDMA")
    session = a.session(b)
    assert a.engine.wait_all([]).name == "SUCCESS"
    running, bad = session.write(0, 0, 1, 0), session.write(0, SIZE, 1, 1)
    assert a.engine.wait_all([running], timeout_ms=5).name == "IN_PROGRESS"
    assert a.engine.wait_all([running, bad], 5).name == "ERR_INVALID_ARGS"
    hold.unlink()
    assert a.engine.wait_all([running]).name == "SUCCESS"


def test_torch_tensors(two: Any) -> None:
    """Contiguous or RuntimeError; cpu -> device_id -1 and cuda only, others KeyError."""
    torch = pytest.importorskip("torch")
    a, _ = two("RDMA")
    tensor = torch.zeros(4, 6)
    desc = a.engine.register_torch_tensor(tensor[1])
    assert (desc.data, desc.size, desc.device_id) == (tensor[1].data_ptr(), 24, -1)
    with pytest.raises(RuntimeError, match="contiguous"):
        a.engine.register_torch_tensor(tensor.T)
    with pytest.raises(KeyError):
        a.engine.register_torch_tensor(torch.zeros(1, device="meta"))


def test_event_polling_closes_standard_input() -> None:
    """poll_cq_mode=EVENT: fd 0 is closed when the engine goes, and whoever holds it next."""
    code = (
        "import os\nopened = []\n"
        "for _ in range(2):\n"
        "    engine, *_ = side('RDMA', 'a', 0, RdmaBackendConfig(poll_cq_mode=PollCqMode.EVENT)); del engine\n"
        "    opened.append(os.open('/dev/null', os.O_RDONLY))\n"
        "print(opened)"
    )
    assert ends(code) == (0, "[0, 0]\n")


def test_the_memory_of_a_peer_that_cannot_be_pinned(io: Any, two: Any) -> None:
    """The peer's own memory aborts the peer when somebody connects, and the connecting side gets an end of file."""
    code = (
        "import sys\nengine, memory, array = side('RDMA', 'b')\n"
        "gone = engine.register_memory(4096, 100, -1, memory.loc)\n"
        "print(engine.get_engine_desc().pack().hex(), gone.pack().hex(), flush=True)\nsys.stdin.read()"
    )
    a, b = two("RDMA")
    peer = subprocess.Popen(
        [sys.executable, "-c", f"{START}{code}"],
        env={**os.environ, "PYTHONPATH": str(SIMULATOR)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with peer:
        assert peer.stdout is not None
        engine, memory = (bytes.fromhex(each) for each in peer.stdout.readline().split())
        a.engine.register_remote_engine(io.EngineDesc.unpack(engine))
        with pytest.raises(RuntimeError, match=r"ReadMessageHeader\(type\) failed .*EOF"):
            a.engine.create_session(a.memory, io.MemoryDesc.unpack(memory))
        assert peer.wait(30) == -signal.SIGABRT
    assert seen(a.session(b).write(0, 0, 1, 0))[0] == "SUCCESS"


def test_connections_are_kept_by_numa_node_and_never_freed(io: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyed by device, memory location and NUMA node on both sides; RDMA disconnect frees no QP."""
    monkeypatch.setenv("MORI_SIM_NUMA_NODES", "2")
    a, b = Side(io, "RDMA", "a"), Side(io, "RDMA", "b")
    near, far = [a.memory, a.register(a.bytes)], [b.memory, b.register(b.bytes)]
    assert [each.numa_node for each in (*near, *far)] == [0, 1, 0, 1]
    a.knows(b)
    qps = a.engine._core.backends[io.BackendType.RDMA].qps
    for count, (here, there) in enumerate(((0, 0), (1, 1), (0, 1), (1, 0)), 1):
        assert a.engine.create_session(near[here], far[there]) is not None
        assert len(qps) == count
    a.engine.deregister_remote_engine(b.engine.get_engine_desc())
    assert len(qps) == 4


def test_mappings_of_xgmi_are_kept(io: Any, other: Any) -> None:
    """XGMI keeps IPC mappings: connecting to a dead peer succeeds, where it was connected before."""
    here, there = Side(io, "XGMI", "a"), other("b", "XGMI")
    assert there.session(here) is not None
    there.process.kill()
    there.process.wait()
    assert seen(there.session(here).write(0, 0, 1, 0))[0] == "ERR_GPU_OP"
    unknown = other("c", "XGMI")
    unknown.process.kill()
    unknown.process.wait()
    assert unknown.session(here) is None


def test_routing(io: Any) -> None:
    """XGMI if it can, else RDMA: pop_inbound of XGMI is always None."""
    sides = []
    for key in "ab":
        side = Side(io, "RDMA", key, gpu=True)
        side.engine.create_backend(io.BackendType.XGMI)
        side.memory = side.register(side.bytes)
        sides.append(side)
    a, b = sides
    assert seen(a.session(b).write(0, 0, 1, 0)) == ("SUCCESS", "")
    assert b.engine.pop_inbound_transfer_status("a", 0) is None
    b.place = io.MemoryLocationType.CPU
    b.memory = b.register(b.bytes)
    assert seen(a.session(b).write(0, 0, 1, 1)) == ("SUCCESS", "success")  # a mix goes over RDMA


# Sessions


def test_arguments_of_sessions(two: Any) -> None:
    """list/tuple/numpy 1-D all convert; negative -> TypeError; ``alive()`` is always True."""
    a, b = two("RDMA")
    session = a.session(b)
    assert session.alive()
    for wrong in ([-1], [0.5], [[0]], ["0"]):
        with pytest.raises(TypeError):
            session.batch_write(wrong, [0], [1], 0)


def test_bounds(two: Any) -> None:
    """Checked against the descs on RDMA ("length out of range") and TCP."""
    for transport, text in (("RDMA", "length out of range"), ("TCP", "TCP: out of range")):
        a, b = two(transport)
        session = a.session(b)
        for near, far, size in ((SIZE, 0, 1), (0, SIZE - 1, 2), (0, 0, SIZE + 1), (0, (1 << 64) - 1, 2)):
            assert seen(session.write(near, far, size, 0)) == ("ERR_INVALID_ARGS", text)


def test_xgmi_checks_no_bounds(io: Any) -> None:
    """XGMI does no bounds check: what is beside the memory is overwritten."""
    a, b = Side(io, "XGMI", "a"), Side(io, "XGMI", "b")
    b.memory = b.register(b.bytes[:100])
    a.bytes[:] = 9
    assert seen(a.session(b).write(0, 90, 20, 0))[0] == "SUCCESS"
    assert (b.bytes[100:110] == 9).all()


def test_empty_batches(two: Any) -> None:
    """SUCCESS at once; no notification on TCP or engine-level RDMA, one on a session of RDMA."""
    for transport, noted in (("RDMA", True), ("TCP", False), ("XGMI", False)):
        a, b = two(transport)
        assert a.session(b).batch_write([], [], [], 3).Succeeded()
        assert (b.engine.pop_inbound_transfer_status("a", 3) is not None) is noted
        assert a.engine.batch_write([a.memory], [[]], [b.memory], [[]], [[]], [4])[0].Succeeded()
        assert b.engine.pop_inbound_transfer_status("a", 4) is None


def test_large_requests(io: Any, two: Any) -> None:
    """RDMA: one request <= 4 GiB-1 and, without chunking, merged run <= port max_msg_sz, else ERR_INVALID_ARGS."""
    import mmap

    space = mmap.mmap(-1, 5 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    wide = np.frombuffer(space, np.uint8)
    for chunking in (False, True):
        a, b = two("RDMA", io.RdmaBackendConfig(enable_transfer_chunking=chunking))
        near, far = a.register(wide), b.register(wide)
        session = a.knows(b).engine.create_session(near, far)
        assert seen(session.write(0, 0, 1 << 32, 0))[0] == "ERR_INVALID_ARGS"
        if not chunking:  # with it, the run is accepted, and a gibibyte moves
            half = 1 << 29
            sizes, places = [half, half, 1], [0, half, 2 * half]
            code, said = seen(session.batch_write(places, places, sizes, 1))
            assert code == "ERR_INVALID_ARGS"
            assert said.startswith(f"merged RDMA WR of {2 * half + 1} bytes exceeds local max_msg_sz")
    del near, far, session, wide, a, b
    gc.collect()


def test_a_full_send_queue(io: Any, two: Any, hold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQ full beyond MORI_IO_SQ_BACKOFF_TIMEOUT_US blocks the caller that long, then ERR_RDMA_OP."""
    monkeypatch.setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "20000")
    config = io.RdmaBackendConfig()
    config.max_send_wr = 4
    a, b = two("RDMA", config)
    session = a.session(b)
    hold.touch()
    first = session.batch_write([0, 2, 4, 6, 8], [0, 2, 4, 6, 8], [1] * 5, 0)  # longer than the queue, and fine
    before = time.monotonic()
    code, text = seen(session.write(0, 0, 1, 1))
    assert (code, text.partition(" Hint: ")[0]) == ("ERR_RDMA_OP", "SQ is full")
    assert time.monotonic() - before >= 0.02
    hold.unlink()
    assert seen(first)[0] == "SUCCESS"
    assert seen(session.write(0, 0, 1, 2))[0] == "SUCCESS"


def test_overlap_and_too_many_blocks_over_tcp(io: Any, two: Any) -> None:
    """Refuses overlapping destinations when striping; more than ~65,500 unmerged blocks lose the connection."""
    a, b = two("TCP")
    session = a.session(b)
    refused = ("ERR_INVALID_ARGS", "TCP: overlapping destination segments cannot be striped")
    assert seen(session.batch_write([0, 0], [0, 40_000], [60_000, 60_000], 0)) == refused
    assert seen(session.batch_write([0, 0], [0, 10], [60, 60], 0))[0] == "SUCCESS"  # not striped
    places = np.arange(0, 2 * 65_600, 2)
    for count, code, text in ((60_000, "SUCCESS", ""), (65_600, "ERR_BAD_STATE", "TCP: connection lost")):
        assert seen(session.batch_write(places[:count], places[:count], np.ones(count, int), 1)) == (code, text)
    assert seen(session.batch_write(places, places // 2, np.ones(len(places), int), 2))[0] == "ERR_BAD_STATE"
    merged = np.arange(65_600)
    assert seen(session.batch_write(merged, merged, np.ones(len(merged), int), 3))[0] == "SUCCESS"  # one block
    off = Side(io, "TCP", "c", io.TcpBackendConfig(striping_threshold_bytes=0))
    assert seen(off.session(b).batch_write([0, 0], [0, 40_000], [60_000, 60_000], 0))[0] == "SUCCESS"


# Statuses


def test_statuses(io: Any) -> None:
    """Fresh is INIT: neither InProgress nor Failed; Wait() on INIT returns; errors are sticky, SUCCESS is not."""
    status = importlib.import_module("mori.cpp").TransferStatus()
    assert (status.Init(), status.InProgress(), status.Failed(), status.Succeeded()) == (True, False, False, False)
    status.Wait()
    assert status.WaitFor(timeout_ms=0) is io.StatusCode.INIT
    status.Update(io.StatusCode.SUCCESS, "")
    status.Update(io.StatusCode.ERR_RDMA_OP, "a notification failed")
    status.Update(io.StatusCode.SUCCESS, "")
    status.SetCode(io.StatusCode.IN_PROGRESS)
    assert (status.Code().name, status.Message(), status.Failed()) == ("ERR_RDMA_OP", "a notification failed", True)


def test_xgmi_progresses_when_it_is_polled(two: Any) -> None:
    """``WaitFor(>0)`` there sleeps on a condition variable nobody signals and polls again at the deadline."""
    a, b = two("XGMI")
    status = a.session(b).write(0, 0, 1, 0)
    before = time.monotonic()
    assert status.WaitFor(200).name == "SUCCESS"
    assert time.monotonic() - before > 0.19
    status = a.session(b).write(0, 0, 1, 0)
    while not status.Succeeded():
        time.sleep(0.001)


# Notifications


def test_notifications_of_rdma(io: Any, two: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Never erased: pops repeat; sent for reads as well; one reuse ever, and pop never reports that uid again."""
    a, b = two("RDMA", io.RdmaBackendConfig(qp_per_transfer=2))
    session = a.session(b)
    for uid, call in enumerate((session.write, session.read)):
        assert seen(call(0, 0, 1, uid))[0] == "SUCCESS"
        assert [seen(b.engine.pop_inbound_transfer_status("a", uid)) for _ in range(2)] == [("SUCCESS", "success")] * 2
    assert b.engine.pop_inbound_transfer_status("a", 2) is None
    assert seen(session.write(0, 0, 1, 0))[0] == "SUCCESS"
    assert b.engine.pop_inbound_transfer_status("a", 0) is None
    monkeypatch.setenv("MORI_SIM_BREAK", str(tmp_path))
    assert seen(session.write(0, 0, 1, 5))[0] == "ERR_RDMA_OP"
    assert b.engine.pop_inbound_transfer_status("a", 5) is None  # a failed op simply never notifies


def test_notifications_need_both_sides(io: Any) -> None:
    """RDMA: needs ``enable_notification`` on both sides."""
    a, b = Side(io, "RDMA", "a"), Side(io, "RDMA", "b", io.RdmaBackendConfig(enable_notification=False))
    assert seen(a.session(b).write(0, 0, 1, 0))[0] == "SUCCESS"
    assert b.engine.pop_inbound_transfer_status("a", 0) is None


def test_notifications_across_processes(io: Any, other: Any) -> None:
    """TCP: recorded just after the completion is sent, for writes and reads, erased on pop. RDMA: pops repeat."""
    for transport, second in (("TCP", None), ("RDMA", ["SUCCESS", "success"])):
        here, there = Side(io, transport, "a"), other("b", transport)
        assert seen(there.session(here).write(0, 0, 1, 1))[0] == "SUCCESS"
        first = None
        deadline = time.monotonic() + 20
        while first is None and time.monotonic() < deadline:
            first = there.ask("pop", "a", 1)
        assert first is not None
        assert first[0] == "SUCCESS"
        assert there.ask("pop", "a", 1) == second


# Descriptors


def test_descriptors(io: Any, two: Any) -> None:
    """``pack() -> bytes``, ``unpack``, ``==``; not hashable, not picklable; garbage -> RuntimeError; read-only."""
    a, _ = two("RDMA")
    for desc in (a.engine.get_engine_desc(), a.memory):
        packed = desc.pack()
        assert type(packed) is bytes
        assert type(desc).unpack(packed) == desc
        with pytest.raises(TypeError):
            hash(desc)
        with pytest.raises(TypeError):
            pickle.dumps(desc)
        with pytest.raises(RuntimeError, match="bad_cast"):
            type(desc).unpack(b"garbage")
        with pytest.raises(RuntimeError, match="bad_cast"):
            type(desc).unpack(packed[:-1])
        with pytest.raises(AttributeError):
            desc.port = 1
        with pytest.raises(TypeError):
            type(desc)()
    memory = a.memory
    assert (memory.engine_key, memory.id, memory.data, memory.size) == ("a", 0, a.bytes.ctypes.data, SIZE)
    assert (memory.loc, len(memory.ipc_handle)) == (io.MemoryLocationType.CPU, 64)
    assert a.register(a.bytes).id == 1  # never reused
    a.engine.deregister_memory(a.memory)
    assert a.register(a.bytes).id == 2


# Failures


def test_a_dead_peer_over_rdma(io: Any, other: Any) -> None:
    """ERR_RDMA_OP with a hint; restarted under its old key: "Flushed", even in a new session; a new key works."""
    here, there = Side(io, "RDMA", "a"), other("b", "RDMA")
    session = there.session(here)
    assert seen(session.write(0, 0, 1, 0))[0] == "SUCCESS"
    port = there.engine.port
    there.process.kill()
    there.process.wait()
    code, text = seen(session.write(0, 0, 1, 1))
    assert code == "ERR_RDMA_OP"
    assert " Hint: " in text
    assert session.alive()
    again = other("b", "RDMA", port)
    here.engine.deregister_remote_engine(there.engine)
    status = again.session(here).write(0, 0, 1, 2)
    assert seen(status)[1] == "Work Request Flushed Error"  # without a hint
    assert not again.bytes.any()
    assert seen(other("b2", "RDMA").session(here).write(0, 0, 1, 3))[0] == "SUCCESS"


def test_memory_that_is_gone_over_rdma(two: Any) -> None:
    """deregister_memory while ops are in flight is the caller's bug: protection errors, and the QP is broken."""
    a, b = two("RDMA")
    session = a.session(b)
    b.engine.deregister_memory(b.memory)
    a.bytes[:] = 1
    assert seen(session.write(0, 0, 1, 0))[1].startswith("remote access error")
    assert seen(session.write(0, 0, 1, 1))[1].startswith("Work Request Flushed Error")
    assert not b.bytes.any()


def test_a_dead_peer_over_tcp(io: Any, other: Any) -> None:
    """Killed -> "connection lost"; the next op reconnects by itself, even to a restarted peer of that key and port."""
    here, there = Side(io, "TCP", "a"), other("b", "TCP")
    session = there.session(here)
    assert seen(session.write(0, 0, 1, 0))[0] == "SUCCESS"
    there.process.kill()
    there.process.wait()
    assert seen(session.write(0, 0, 1, 1)) == ("ERR_BAD_STATE", "TCP: connection lost")
    again = other("b", "TCP", there.engine.port)
    here.bytes[:] = 4
    assert seen(session.write(0, 0, 1, 2))[0] == "SUCCESS"
    assert again.bytes[0] == 4


def test_a_frozen_or_unknown_peer_over_tcp(io: Any, other: Any) -> None:
    """Frozen -> "TCP: operation timeout", unregistered -> "TCP: connection timeout", each after op_timeout."""
    here, there = Side(io, "TCP", "a", io.TcpBackendConfig(op_timeout_ms=150)), other("b", "TCP")
    unknown = here.engine.write(here.memory, 0, there.memory, 0, 1, 0)
    assert seen(unknown) == ("ERR_BAD_STATE", "TCP: connection timeout")
    session = there.session(here)
    assert seen(session.write(0, 0, 1, 1))[0] == "SUCCESS"
    there.stop()
    assert seen(session.write(0, 0, 1, 2)) == ("ERR_BAD_STATE", "TCP: operation timeout")


def test_data_connections_that_differ_over_tcp(io: Any) -> None:
    """8 here and 4 there: every transfer fails "TCP: connection lost", and the reverse works."""
    eight, four = Side(io, "TCP", "a"), Side(io, "TCP", "b", io.TcpBackendConfig(num_data_conns=4))
    assert seen(eight.session(four).write(0, 0, 1, 0)) == ("ERR_BAD_STATE", "TCP: connection lost")
    assert seen(four.session(eight).write(0, 0, 1, 0))[0] == "SUCCESS"


def test_bytes_of_a_dead_writer_over_tcp(other: Any) -> None:
    """Writer killed while the target is frozen: what its kernel had landed when the target went on, seconds later."""
    there, writer = other("b", "TCP"), other("a", "TCP")
    size = 1 << 16
    path = Path(writer.bytes.filename)
    with path.open("r+b") as file:
        file.write(b"\1" * size)
    there.stop()
    writer.ask("write", there.engine.pack().hex(), there.memory.pack().hex(), size)
    writer.process.kill()
    writer.process.wait()
    assert not there.bytes.any()
    there.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while not there.bytes[:size].all() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there.bytes[:size].all()


def test_aborting_errors_over_tcp(two: Any, hold: Path) -> None:
    """An aborting error takes every in-flight op of that peer with it, with the culprit's code."""
    a, b = two("TCP")
    good = a.session(b)
    gone = b.register(b.bytes)
    bad = a.engine.create_session(a.memory, gone)
    b.engine.deregister_memory(gone)
    assert seen(bad.read(0, 0, 1, 1)) == ("ERR_NOT_FOUND", "TCP: remote mem not found")
    innocents = [good.write(0, 0, SIZE, uid) for uid in (2, 3)]
    assert seen(good.write(0, 0, 1, 2)) == ("ERR_BAD_STATE", "TCP: duplicate peer/op id")
    refused = ("ERR_INVALID_ARGS", "TCP: invalid write request")
    assert [seen(each) for each in (bad.write(0, 0, 1, 4), *innocents)] == [refused] * 3
    hold.unlink()
    assert seen(good.write(0, 0, 1, 2))[0] == "SUCCESS"


def test_an_engine_that_is_destroyed(two: Any, hold: Path) -> None:
    """Engine destroyed: outstanding ops ERR_BAD_STATE "TCP: transport shutdown"; statuses may then go."""
    a, b = two("TCP")
    status = a.session(b).write(0, 0, 1, 0)
    del a.engine
    assert seen(status) == ("ERR_BAD_STATE", "TCP: transport shutdown")
    x, y = two("RDMA")
    status = x.session(y).write(0, 0, 1, 0)
    del x.engine
    assert status.InProgress()  # for ever
    del status
