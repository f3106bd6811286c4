"""Questions to whichever MoRI is importable: ``questions.py NAME...`` prints one answer a line, as JSON.

A question whose answer is the end of its process is asked alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SIZE = 1 << 20
LONGEST = 10.0
"""Seconds after which a transfer counts as one that never ends."""


_kept: list[Any] = []
"""Engines, which have to outlive their sessions."""


class Side(NamedTuple):
    """An engine of this process, with one memory."""

    io: Any
    engine: Any
    memory: Any
    array: npt.NDArray[np.uint8]

    def session(self, other: Side) -> Any:
        self.engine.register_remote_engine(other.engine.get_engine_desc())
        return self.engine.create_session(self.memory, other.memory)


def side(key: str, transport: str = "RDMA", host: str = "127.0.0.1", port: int = 0, **parameters: Any) -> Side:
    io: Any = importlib.import_module("mori.io")
    engine = io.IOEngine(key, io.IOEngineConfig(host=host, port=port))
    quiet = {"enable_notification": False} if transport == "RDMA" else {}
    config = getattr(io, f"{transport.capitalize()}BackendConfig")(**{**quiet, **parameters})
    engine.create_backend(getattr(io.BackendType, transport), config)
    array = np.zeros(SIZE, np.uint8)
    made = Side(io, engine, engine.register_memory(array.ctypes.data, SIZE, -1, io.MemoryLocationType.CPU), array)
    _kept.append(made)
    return made


def pair(**parameters: Any) -> tuple[Side, Side, Any]:
    """Two engines, and the session from one to the other."""
    near, far = side("a", **parameters), side("b", **parameters)
    return near, far, near.session(far)


def ended(status: Any) -> str:
    """How a transfer ended. After ``Hint:``, the library says at length what may help."""
    until = time.monotonic() + LONGEST
    while not (status.Succeeded() or status.Failed()):
        if time.monotonic() > until:
            return "never"
        time.sleep(0.001)
    text, hint, _ = status.Message().partition(" Hint: ")
    return f"{status.Code().name}: {text}{hint.rstrip()}"


def write(session: Any, near: Any = (0,), far: Any = (0,), sizes: Any = (1,)) -> str:
    return ended(session.batch_write(list(near), list(far), list(sizes), session.allocate_transfer_uid()))


def refused(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The error of a call, without the addresses and the module names in it."""
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "taken"


class Other:
    """An engine of another process, which ends with its standard input."""

    def __init__(self, key: str, port: int = 0, memory: str = "") -> None:
        io: Any = importlib.import_module("mori.io")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", key, str(port), memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said: Iterator[str] = (line for line in self.process.stdout if line.startswith("{"))
        answer = json.loads(next(self.said))
        self.engine = io.EngineDesc.unpack(bytes.fromhex(answer["engine"]))
        self.memory = io.MemoryDesc.unpack(bytes.fromhex(answer["memory"]))

    def session(self, near: Side) -> Any:
        near.engine.register_remote_engine(self.engine)
        return near.engine.create_session(near.memory, self.memory)

    def sum(self) -> int:
        """Of its memory."""
        assert self.process.stdin is not None
        self.process.stdin.write("sum\n")
        self.process.stdin.flush()
        return int(json.loads(next(self.said))["sum"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # it takes a moment

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(key: str, port: str, address: str) -> None:
    """Offer an array, or a page at an address."""
    mine = side(key, port=int(port))
    if address:
        mine = mine._replace(memory=mine.engine.register_memory(int(address), 4096, -1, mine.memory.loc))
    packed = {"engine": mine.engine.get_engine_desc().pack().hex(), "memory": mine.memory.pack().hex()}
    print(json.dumps(packed), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"sum": int(mine.array.sum())}), flush=True)


@contextlib.contextmanager
def file_of(variable: str) -> Iterator[None]:
    """Names a file in the environment, which exists meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.touch()
        os.environ[variable] = str(path)
        yield


# Names and configurations


def names() -> Any:
    io: Any = importlib.import_module("mori.io")
    return [hasattr(io, "TcpBackendConfig"), hasattr(io.BackendType, "TCP"), hasattr(io.IOEngine, "pop_peer_failure")]


def subscripted_enumeration() -> Any:
    io: Any = importlib.import_module("mori.io")
    return refused(lambda: io.BackendType["RDMA"])


def unknown_parameter() -> Any:
    return refused(side, "a", pigeons=1)


def text_for_a_number() -> Any:
    return refused(side, "a", qp_per_transfer="2")


def boolean_for_a_number() -> Any:
    io: Any = importlib.import_module("mori.io")
    return io.RdmaBackendConfig(qp_per_transfer=True).qp_per_transfer


def number_for_a_boolean() -> Any:
    io: Any = importlib.import_module("mori.io")
    return io.RdmaBackendConfig(enable_transfer_chunking=1).enable_transfer_chunking


def no_queue_pair() -> Any:
    return write(pair(qp_per_transfer=0)[2])


def no_notification_with_notifications() -> Any:
    return refused(side, "a", notif_per_qp=0, enable_notification=True)


def no_notification_without() -> Any:
    return refused(side, "a", notif_per_qp=0)


def small_chunks() -> Any:
    return refused(side, "a", enable_transfer_chunking=True, chunk_bytes=100)


def tcp() -> Any:
    io: Any = importlib.import_module("mori.io")
    engine = io.IOEngine("a", io.IOEngineConfig())
    kind = io.BackendType.TCP
    return [refused(engine.create_backend, kind), refused(engine.create_backend, kind, io.IOEngineConfig())]


def tcp_with_a_configuration() -> Any:
    io: Any = importlib.import_module("mori.io")
    io.IOEngine("a", io.IOEngineConfig()).create_backend(io.BackendType.TCP, io.RdmaBackendConfig())


# Descriptors


def descriptors() -> Any:
    mine = side("a")
    desc, memory = mine.engine.get_engine_desc(), mine.memory
    kept = [mine.io.EngineDesc.unpack(desc.pack()) == desc, mine.io.MemoryDesc.unpack(memory.pack()) == memory]
    place = [memory.engine_key, memory.id, memory.device_id, memory.size, memory.loc.name]
    return [
        *kept,
        *place,
        desc.key,
        desc.host,
        desc.port > 0,
        bool(desc.node_id),
        memory.data == mine.array.ctypes.data,
    ]


def garbage() -> Any:
    io: Any = importlib.import_module("mori.io")
    return [refused(kind.unpack, raw) for kind in (io.EngineDesc, io.MemoryDesc) for raw in (b"x", b"\xc0", b"")]


def no_bytes() -> Any:
    io: Any = importlib.import_module("mori.io")
    return refused(io.MemoryDesc.unpack, None)


# Sessions and transfers


def unregistered_engine() -> Any:
    near, far = side("a"), side("b")
    return near.engine.create_session(near.memory, far.memory) is None


def unknown_memory() -> Any:
    near, far = side("a"), side("b")
    far.engine.deregister_memory(far.memory)
    return refused(near.session, far)


def host_memory_over_xgmi() -> Any:
    return side("a", "XGMI").session(side("b", "XGMI")) is None


def lengths_that_differ() -> Any:
    return write(pair()[2], [0, 1])


def beyond_the_end() -> Any:
    session = pair()[2]
    return [write(session, [0], [SIZE - 1], [2]), write(session, [SIZE - 1], [0], [2]), write(session)]


def an_empty_batch() -> Any:
    return write(pair()[2], [], [], [])


def a_negative_offset() -> Any:
    return refused(write, pair()[2], [-1])


def many_blocks() -> Any:
    near, far, session = pair()
    near.array[:] = 1
    offsets = range(0, 9000 * 100, 100)
    return [write(session, offsets, offsets, [7] * 9000), int(far.array.sum())]


def local_memory_that_is_gone() -> Any:
    near, _, session = pair()
    near.engine.deregister_memory(near.memory)
    return [write(session), write(session)]


def remote_memory_that_is_gone() -> Any:
    near, far, session = pair()
    far.engine.deregister_memory(far.memory)
    return [write(session), write(session), near.engine.pop_peer_failure() is None]


def a_large_request() -> Any:
    os.environ["MORI_SIM_MAX_MSG"] = "1000"
    return write(pair()[2], sizes=[1001])


def a_full_queue() -> Any:
    os.environ.update({"MORI_IO_QP_MAX_SEND_WR": "4", "MORI_IO_SQ_BACKOFF_TIMEOUT_US": "1000"})
    session = pair()[2]
    with file_of("MORI_SIM_HOLD"):
        offsets = [0, 10, 20, 30]
        first = session.batch_write(offsets, offsets, [1] * 4, 0)
        second = write(session, offsets, offsets, [1] * 4)
    return [second, ended(first)]


def a_queue_that_is_shortened_after_connecting() -> Any:
    session = pair()[2]
    os.environ.update({"MORI_IO_QP_MAX_SEND_WR": "1", "MORI_IO_SQ_BACKOFF_TIMEOUT_US": "1000"})
    with file_of("MORI_SIM_HOLD"):
        first = session.batch_write([0, 10, 20], [0, 10, 20], [1] * 3, 0)
        second = session.batch_write([0, 10, 20], [0, 10, 20], [1] * 3, 1)
        time.sleep(0.1)
    return [ended(first), ended(second)]


# Peers


def a_frozen_peer() -> Any:
    near, far = side("a"), Other("b")
    session = far.session(near)
    far.stop()
    near.array[:] = 3
    said = write(session, sizes=[SIZE])
    far.process.send_signal(signal.SIGCONT)
    return [said, far.sum() == 3 * SIZE]


def a_stopped_peer() -> Any:
    os.environ["MORI_IO_CP_TIMEOUT_MS"] = "500"
    near, far = side("a"), Other("b")
    far.stop()
    said = refused(far.session, near)
    far.kill()
    return [said, refused(far.session, near).replace(str(far.engine.port), "PORT")]


def a_peer_whose_memory_cannot_be_pinned() -> Any:
    near, far = side("a"), Other("b", memory="4096")
    return [refused(far.session, near), far.process.wait()]


def a_dead_peer() -> Any:
    """Then its successor under the old key and at the old port, and one under another key."""
    near, far = side("a"), Other("b")
    session = far.session(near)
    first = write(session)
    far.kill()
    said = write(session)
    failure = near.engine.pop_peer_failure()
    again = Other("b", far.engine.port)
    near.engine.deregister_remote_engine(far.engine)
    heir = write(again.session(near))
    told = [failure.reason.name, failure.remote_engine_key, failure.detail]
    return [first, said, told, heir, again.sum(), write(Other("b2").session(near))]


def a_fault_of_the_card() -> Any:
    os.environ["MORI_SIM_FAULT"] = "/nowhere"  # whether there may be one is read when the card is opened
    near, _, session = pair()
    assert near.engine.pop_peer_failure() is None
    with file_of("MORI_SIM_FAULT"):
        until = time.monotonic() + LONGEST
        while (failure := near.engine.pop_peer_failure()) is None and time.monotonic() < until:
            time.sleep(0.01)
    detail = failure.detail.partition(" on device")[0]
    return [failure.reason.name, failure.remote_engine_key, detail, write(session)]


# What ends the process


def no_gpu() -> Any:
    os.environ["MORI_SIM_GPUS"] = "0"
    side("a")


def no_port() -> Any:
    os.environ["MORI_SIM_PORTS"] = "0"
    return refused(side, "a")


def no_port_and_no_second_gpu() -> Any:
    os.environ.update({"MORI_SIM_PORTS": "0", "MORI_SIM_GPUS": "1", "MORI_DISABLE_AUTO_XGMI": "0"})
    return refused(side, "a")


def no_gpu_for_xgmi() -> Any:
    os.environ["MORI_SIM_GPUS"] = "0"
    return refused(side, "a", "XGMI")


def busy_port() -> Any:
    side("b", port=side("a").engine.get_engine_desc().port)


def address_of_another_machine() -> Any:
    side("a", host="10.9.8.7")


def host_name() -> Any:
    return side("a", host="localhost").engine.get_engine_desc().host


def memory_that_cannot_be_pinned() -> Any:
    near, far = side("a"), side("b")
    memory = near.engine.register_memory(4096, 100, -1, near.memory.loc)
    near._replace(memory=memory).session(far)


def more_memory_than_may_be_pinned() -> Any:
    os.environ["MORI_SIM_MEMLOCK"] = "999"
    pair()


def session_after_its_engine() -> Any:
    session = pair()[2]
    _kept.clear()
    return write(session)


def status_that_is_dropped_in_flight() -> Any:
    session = pair()[2]
    with file_of("MORI_SIM_HOLD"):
        session.batch_write([0], [0], [1], 0)


ALONE = {
    "tcp_with_a_configuration",
    "a_large_request",
    "a_full_queue",
    "a_queue_that_is_shortened_after_connecting",
    "a_fault_of_the_card",
    "no_gpu",
    "no_port",
    "no_port_and_no_second_gpu",
    "a_stopped_peer",
    "no_gpu_for_xgmi",
    "busy_port",
    "address_of_another_machine",
    "memory_that_cannot_be_pinned",
    "more_memory_than_may_be_pinned",
    "session_after_its_engine",
    "status_that_is_dropped_in_flight",
}
"""Questions that change the environment of their process, or that may end it."""


def answer(said: Any) -> None:
    print("\n" + json.dumps({"answer": said}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        for name in sys.argv[1:]:
            answer(globals()[name]())
            _kept.clear()
