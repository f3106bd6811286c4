"""A side dies, stands still, or cannot be reached, in the middle of a request between two real ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import free_port
from support.process import CONFIG, FAILED, START, WAITING, Host, N, Pair, Process, rooms

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(900)

KEY = "rank"
MADE = ("support.pools", "make", {"kind": "hybrid"})

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


def _rank(process: Process, port: int, at: str = "", **config: Any) -> None:
    """Make the process's rank, once SGLang is imported."""
    process.result(START)
    process(Host.start, KEY, MADE, port, {**CONFIG, **config}, at=at)
    if process.name == "prefill":
        process(Host.rank, KEY, "fill", 1)


def _half(pair: Pair) -> int:
    """A request of which one chunk of two was sent."""
    room: int = next(rooms)
    pair.open(room)
    pair.on(pair.decode, "name", room)
    assert pair.on(pair.prefill, "reach", room, WAITING)[-1] == WAITING
    pair.on(pair.prefill, "begin", room)
    pair.on(pair.prefill, "chunk", room, 0, 128)
    return room


def _again(pair: Pair) -> None:
    """Requests may fail until both sides have noticed that the other is back. Then one succeeds."""
    reasons = []
    for _ in range(20):
        pair.on(pair.decode, "meet")
        room = next(rooms)
        pair.open(room)
        pair.on(pair.decode, "name", room)
        if pair.on(pair.prefill, "soon", room, WAITING):
            pair.on(pair.prefill, "abort", room)
            break
        if pair.on(pair.decode, "soon", room, FAILED):
            reasons.append(pair.on(pair.decode, "reason", room))
        for process in (pair.prefill, pair.decode):
            pair.on(process, "abort", room)
        pair.end(room)
    else:
        raise AssertionError(reasons)
    pair.ordinary()


def _fails(pair: Pair, *processes: Process, room: int) -> None:
    for process in processes:
        assert pair.on(process, "reach", room, FAILED)[-1] == FAILED, process.name
        pair.on(process, "reason", room)


def test_a_side_that_stands_still_fails_the_request_and_may_go_on(start: Starter) -> None:
    port = free_port()
    pair = Pair(start("prefill"), start("decode"), KEY)
    for process in (pair.prefill, pair.decode):
        _rank(process, port)
    pair.on(pair.decode, "meet")
    for still, other in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
        room = _half(pair)
        still.stop()
        _fails(pair, other, room=room)
        still.go_on()
        _fails(pair, still, room=room)  # no request succeeds on one side alone
        if still is pair.prefill:
            pair.on(still, "chunk", room, 128, N)  # it is ignored
        assert pair.on(pair.decode, "release", room, 60.0) < 60.0
        pair.end(room)
        _again(pair)


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_cut_network_fails_the_request_on_both_sides_and_is_mended(start: Starter, cable: Cable) -> None:
    port = free_port()
    (inside, near), (outside, far) = cable.hosts
    pair = Pair(start("prefill", tuple(inside), near), start("decode", tuple(outside), far), KEY)
    _rank(pair.prefill, port, listen=f"tcp://{near}:0", insecure=True)
    _rank(pair.decode, port, near, listen=f"tcp://{far}:0", insecure=True)
    pair.on(pair.decode, "meet")
    pair.ordinary()
    room = _half(pair)
    cable.cut()
    pair.on(pair.prefill, "chunk", room, 128, N)
    _fails(pair, pair.decode, pair.prefill, room=room)
    cable.mend()
    assert pair.on(pair.decode, "release", room, 60.0) < 60.0
    pair.end(room)
    _again(pair)


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
