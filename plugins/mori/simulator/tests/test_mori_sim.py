"""The simulator of MoRI against what is known of the library: each test quotes what it stands for."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
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
def io() -> Any:
    return importlib.import_module("mori.io")


class Side:
    """An engine of this process with one memory."""

    def __init__(self, io: Any, transport: str, key: str) -> None:
        self.engine = io.IOEngine(key, io.IOEngineConfig("127.0.0.1", 0))
        self.engine.create_backend(io.BackendType[transport])
        self.bytes = np.zeros(SIZE, np.uint8)
        self.place = io.MemoryLocationType.GPU if transport == "XGMI" else io.MemoryLocationType.CPU
        self.memory = self.engine.register_memory(self.bytes.ctypes.data, SIZE, 0, self.place)

    def knows(self, other: Side) -> None:
        self.engine.register_remote_engine(other.engine.get_engine_desc())


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
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        self.engine = io.EngineDesc.unpack(bytes.fromhex(answer["engine"]))
        self.memory = io.MemoryDesc.unpack(bytes.fromhex(answer["memory"]))

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
    "import numpy as np\nfrom mori.io import *\n"
    "def side(kind, key, port=0, config=None):\n"
    "    engine = IOEngine(key, IOEngineConfig('127.0.0.1', port))\n"
    "    engine.create_backend(BackendType[kind], config)\n"
    "    array = np.zeros(1000, np.uint8)\n"
    "    return engine, engine.register_memory(array.ctypes.data, 1000, 0, MemoryLocationType.CPU), array\n"
    "def pair(config=None):\n"
    "    (a, near, x), (b, far, y) = side('RDMA', 'a', 0, config), side('RDMA', 'b', 0, config)\n"
    "    a.register_remote_engine(b.get_engine_desc())\n"
    "    return a, near, far, (b, x, y)\n"
)
"""How a process of `ends` begins."""


def written(session: Any, nbytes: int = 1) -> tuple[str, str]:
    """How one write ended."""
    status = session.batch_write([0], [0], [nbytes], session.allocate_transfer_uid())
    while not (status.Succeeded() or status.Failed()):
        time.sleep(0.0005)
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


def test_the_enumeration_names_tcp_which_no_release_has(io: Any) -> None:
    assert hasattr(io.BackendType, "TCP")
    assert not hasattr(io, "TcpBackendConfig")
    with pytest.raises(NotImplementedError, match="backend not implemented yet"):
        io.IOEngine("a", io.IOEngineConfig()).create_backend(io.BackendType.TCP)


@pytest.mark.parametrize(
    ("clause", "code", "environment", "status"),
    [
        ("librocm_smi64 reports no GPU: exit(-1)", "side('RDMA', 'a')", {"MORI_SIM_GPUS": "0"}, 255),
        ("create_backend(TCP, <any config>)", "side('TCP', 'a', 0, IOEngineConfig())", {}, -6),
        (
            "RDMA on a busy port: exit(-1)",
            "a = side('RDMA', 'a')[0]; side('RDMA', 'b', a.get_engine_desc().port)",
            {},
            255,
        ),
        (
            "a session must not outlive its engine",
            "a, n, f, k = pair(); s = a.create_session(n, f); del a; s.batch_write([0], [0], [1], 0)",
            {},
            -6,
        ),
        (
            "keep the status alive until it is terminal",
            "a, n, f, k = pair(); a.create_session(n, f).batch_write([0], [0], [1], 0)",
            {"MORI_SIM_DELAY_MS": "2000"},
            -6,
        ),
        (
            "also of one that failed while it was posted on one of several QPs: the completion of the others uses it",
            "a, n, f, k = pair(RdmaBackendConfig(qp_per_transfer=2)); s = a.create_session(n, f)\n"
            "first = s.batch_write([0], [0], [1], 0)\n"
            "assert s.batch_write([0], [0], [1], 1).Message().startswith('SQ is full')",
            {"MORI_SIM_DELAY_MS": "2000", "MORI_IO_QP_MAX_SEND_WR": "1", "MORI_IO_SQ_BACKOFF_TIMEOUT_US": "1000"},
            -6,
        ),
        (
            "memory that cannot be pinned: std::abort in RegisterRdmaMemoryRegionAuto",
            "a, n, f, k = pair(); g = a.register_memory(4096, 100, -1, n.loc); print(g.size); a.create_session(g, f)",
            {},
            -6,
        ),
        (
            "as is more memory than may be pinned",
            "a, n, f, k = pair(); a.create_session(n, f)",
            {"MORI_SIM_MEMLOCK": "999"},
            -6,
        ),
    ],
)
def test_what_ends_the_process(clause: str, code: str, environment: dict[str, str], status: int) -> None:
    found, said = ends(f"{code}\nprint('still here')", **environment)
    assert (found, "still here" in said) == (status, False), said
    assert "mori simulator: " in said


@pytest.mark.parametrize("transport", ["RDMA", "XGMI"])
def test_the_target_takes_no_part(io: Any, other: Any, transport: str) -> None:
    """One-sided: a peer that is frozen is written to."""
    here, there = Side(io, transport, "a"), other("b", transport)
    session = there.session(here)
    there.stop()
    here.bytes[:] = 3
    assert written(session, SIZE)[0] == "SUCCESS"
    assert (there.bytes == 3).all()


def test_sessions_that_cannot_be(io: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None for an unregistered engine or what no backend serves; RuntimeError "got=0" for unknown memory."""
    a, b = Side(io, "RDMA", "a"), Side(io, "RDMA", "b")
    assert a.engine.create_session(a.memory, b.memory) is None
    a.knows(b)
    b.engine.deregister_memory(b.memory)
    with pytest.raises(RuntimeError, match=r"remote MR size mismatch.*got=0"):
        a.engine.create_session(a.memory, b.memory)
    x, y = Side(io, "XGMI", "x"), Side(io, "XGMI", "y")
    x.knows(y)
    host = x.engine.register_memory(x.bytes.ctypes.data, SIZE, -1, a.place)
    assert x.engine.create_session(host, y.memory) is None  # XGMI refuses CPU memory
    monkeypatch.setenv("MORI_SIM_GPUS", "0")
    assert x.engine.create_session(x.memory, y.memory) is None


def test_a_dead_peer_over_rdma(io: Any, other: Any) -> None:
    """ERR_RDMA_OP with a hint; restarted under its old key: "Flushed", even in a new session; a new key works."""
    here, there = Side(io, "RDMA", "a"), other("b", "RDMA")
    session = there.session(here)
    assert written(session)[0] == "SUCCESS"
    there.process.kill()
    there.process.wait()
    code, text = written(session)
    assert code == "ERR_RDMA_OP"
    assert " Hint: " in text
    again = other("b", "RDMA", there.engine.port)
    here.engine.deregister_remote_engine(there.engine)
    assert written(again.session(here))[1] == "Work Request Flushed Error"  # without a hint
    assert not again.bytes.any()
    assert written(other("b2", "RDMA").session(here))[0] == "SUCCESS"
