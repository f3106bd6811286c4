"""A side dies, stands still, or cannot be reached, in the middle of a request between two real ranks."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import free_port
from support.process import START, Host, Process

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(900)

N = 256
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
CONFIG: dict[str, Any] = {"backend": "tcp", "heartbeat": 0.5, "liveness": 4.0}
KEY = "rank"
MADE = ("support.pools", "make", {"kind": "hybrid"})
rooms = itertools.count(1)

Starter = Callable[..., Process]


@pytest.fixture
def start(llama: Path) -> Iterator[Starter]:
    """Starts processes, each of which publishes SGLang's configuration. They are killed in the end."""
    made: list[Process] = []

    def start(role: str, inside: tuple[str, ...] = (), host: str = "127.0.0.1") -> Process:
        process = Process(role, inside, {"SGLANG_HOST_IP": host})
        made.append(process)
        process.start(Host.publish, role, "statelink", str(llama), host)
        return process

    yield start
    for process in made:
        process.end()


def _rank(process: Process, port: int, **config: Any) -> None:
    """Make the process's rank, once SGLang is imported."""
    process.result(START)
    process(Host.start, KEY, MADE, port, {**CONFIG, **config})
    if process.name == "prefill":
        process(Host.rank, KEY, "fill", 1)


def _on(process: Process, method: str, *arguments: Any, **named: Any) -> Any:
    return process(Host.rank, KEY, method, *arguments, **named)


def _half(prefill: Process, decode: Process) -> int:
    """A request of which one chunk of two was sent."""
    room = next(rooms)
    _on(prefill, "open", room, N)
    _on(decode, "open", room, N)
    _on(decode, "name", room)
    assert _on(prefill, "reach", room, WAITING)[-1] == WAITING
    _on(prefill, "begin", room)
    _on(prefill, "chunk", room, 0, 128)
    return room


def _ordinary(prefill: Process, decode: Process) -> None:
    _on(decode, "wipe")
    room = _half(prefill, decode)
    _on(prefill, "chunk", room, 128, N)
    for process in (decode, prefill):
        assert _on(process, "reach", room, SUCCESS)[-1] == SUCCESS, _on(process, "reason", room)
    sent, arrived = _on(prefill, "items", room), _on(decode, "items", room)
    for part, buffers in sent.items():
        assert all((ours == theirs).all() for ours, theirs in zip(buffers, arrived[part], strict=True)), part
    assert _on(decode, "stray", room) == 0
    for process in (decode, prefill):
        _on(process, "end", room)


def _again(prefill: Process, decode: Process) -> None:
    """Requests may fail until both sides have noticed that the other is back. Then one succeeds."""
    reasons = []
    for _ in range(20):
        _on(decode, "meet")
        room = next(rooms)
        _on(prefill, "open", room, N)
        _on(decode, "open", room, N)
        _on(decode, "name", room)
        if _on(prefill, "soon", room, WAITING):
            _on(prefill, "abort", room)
            break
        if _on(decode, "soon", room, FAILED):
            reasons.append(_on(decode, "reason", room))
        for process in (prefill, decode):
            _on(process, "abort", room)
            _on(process, "end", room)
    else:
        raise AssertionError(reasons)
    _ordinary(prefill, decode)


def test_a_prefill_that_stands_still_fails_the_request_and_may_go_on(start: Starter) -> None:
    port = free_port()
    prefill, decode = start("prefill"), start("decode")
    for process in (prefill, decode):
        _rank(process, port)
    _on(decode, "meet")
    room = _half(prefill, decode)
    prefill.stop()
    assert _on(decode, "reach", room, FAILED)[-1] == FAILED
    _on(decode, "reason", room)
    prefill.go_on()
    assert _on(prefill, "reach", room, FAILED)[-1] == FAILED, "no request succeeds on one side alone"
    _on(prefill, "chunk", room, 128, N)  # it is ignored
    assert _on(decode, "release", room, 60.0) < 60.0
    for process in (prefill, decode):
        _on(process, "end", room)
    _again(prefill, decode)

    room = _half(prefill, decode)
    decode.stop()
    assert _on(prefill, "reach", room, FAILED)[-1] == FAILED
    _on(prefill, "reason", room)
    decode.go_on()
    assert _on(decode, "reach", room, FAILED)[-1] == FAILED
    _on(decode, "reason", room)
    assert _on(decode, "release", room, 60.0) < 60.0
    for process in (prefill, decode):
        _on(process, "end", room)
    _again(prefill, decode)


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_cut_network_fails_the_request_on_both_sides_and_is_mended(start: Starter, cable: Cable) -> None:
    port = free_port()
    (inside, near), (outside, far) = cable.hosts
    prefill = start("prefill", tuple(inside), near)
    decode = start("decode", tuple(outside), far)
    _rank(prefill, port, listen=f"tcp://{near}:0", insecure=True)
    decode.result(START)
    decode(Host.start, KEY, MADE, port, {**CONFIG, "listen": f"tcp://{far}:0", "insecure": True}, at=near)
    _on(decode, "meet")
    _ordinary(prefill, decode)
    room = _half(prefill, decode)
    cable.cut()
    _on(prefill, "chunk", room, 128, N)
    for process in (decode, prefill):
        assert _on(process, "reach", room, FAILED)[-1] == FAILED, process.name
        _on(process, "reason", room)
    cable.mend()
    assert _on(decode, "release", room, 60.0) < 60.0
    for process in (decode, prefill):
        _on(process, "end", room)
    _again(prefill, decode)


class Cable:
    """Two network namespaces, and a pair of virtual devices between them.

    ``hosts`` are, of each end, what to put before a command so that it runs there, and its address.
    """

    def __init__(self) -> None:
        process = os.getpid()
        self._ends = [(f"sg{process}{end}", f"10.199.{process % 250}.{at}") for at, end in enumerate("ab", 1)]
        self.hosts = [(["ip", "netns", "exec", name], address) for name, address in self._ends]
        (here, _), (there, _) = self._ends
        for name in (here, there):
            _ip(f"netns add {name}")
        _ip(f"-n {here} link add {here} type veth peer name {there} netns {there}")
        for name, address in self._ends:
            _ip(f"-n {name} address add {address}/24 dev {name}")
            _ip(f"-n {name} link set {name} up")
            _ip(f"-n {name} link set lo up")

    def cut(self) -> None:
        """Let nothing through, and tell nobody: packets go to a hardware address that nobody has."""
        self._neighbours("replace", "lladdr 02:00:00:00:00:01 nud permanent")

    def mend(self) -> None:
        """Let everything through again."""
        self._neighbours("del")

    def close(self) -> None:
        for name, _ in self._ends:
            _ip(f"netns del {name}")

    def _neighbours(self, change: str, how: str = "") -> None:
        for (name, _), (_, other) in zip(self._ends, self._ends[::-1], strict=True):
            _ip(f"-n {name} neigh {change} {other} {how} dev {name}")


def _ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {command}: {done.stderr}"


@pytest.fixture
def cable(start: Starter) -> Iterator[Cable]:
    """The namespaces live on, without their names, until the processes inside have ended."""
    made = Cable()
    yield made
    made.close()
