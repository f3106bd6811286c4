"""Speed of the embedded backend between two processes of this machine, against what the kernel gives.

    python -m benchmarks.tcp_backend [--rounds 15] [--json] [--namespaces]

With ``--namespaces``, the processes are in two network namespaces with a pair of interfaces between them (needs root).

Each round runs, one right after the other, for every shape:

    memcpy    one numpy copy of as many bytes, within one process
    writev    process_vm_writev into the other process, 1,024 vectors a call, prepared beforehand
    sendmsg   one TCP connection: writev of 1,024 vectors a call, readv of the same, one byte back
    copy      the backend's same-host path, one batch, from ``submit`` until the outcome is seen
    stream    the same, eight batches of which four are under way at a time; time per batch
    socket    as ``copy``, with same_host_copy off

Blocks are ``contiguous`` at both ends, which the backend makes use of and the floors do not; or ``scattered``: in
random order at both ends, with gaps, and granted one by one. Each figure is that of the quickest round, the one
that other work on the machine disturbed least; only the ratios mean anything elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from statelink.backend import BackendContext, Batch, Blocks, Region
from statelink.tcp import Options, TcpBackend

from .floor import libc
from .namespaces import SPACES, enter, namespaces

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

U64 = npt.NDArray[np.uint64]

SHAPES = ((64, 64 << 10), (1024, 16 << 10), (4096, 4 << 10), (8192, 2 << 10), (16384, 1 << 10))
SPACE = 128 << 20
IOV_MAX = 1024
WARM_UP = 2
STREAM, UNDER_WAY = 8, 4
RATIOS = {
    "copy/writev": ("writev", "copy"),
    "stream/writev": ("writev", "stream"),
    "copy/memcpy": ("memcpy", "copy"),
    "socket/sendmsg": ("sendmsg", "socket"),
}

libc.writev.restype = libc.readv.restype = ctypes.c_ssize_t
libc.writev.argtypes = libc.readv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def open_backend(link: str, memory: npt.NDArray[np.uint8], host: str, *, copy: bool) -> TcpBackend:
    backend = TcpBackend(BackendContext(options=Options(same_host_copy=copy), link=link, host=host))
    backend.register([Region(memory.ctypes.data, memory.nbytes)])
    return backend


def vectors(addresses: U64, nbytes: int) -> U64:
    return np.stack((addresses, np.full(len(addresses), nbytes, np.uint64)), axis=1)


def move_all(call: Callable[[int, int, int], int], sock: socket.socket, array: U64) -> None:
    """Run a vectored socket call over all of ``array``, resuming partial results; plain, blocking."""
    array = array.copy()
    at = 0
    while at < len(array):
        stop = min(at + IOV_MAX, len(array))
        moved = call(sock.fileno(), array[at:].ctypes.data, stop - at)
        assert moved > 0, os.strerror(ctypes.get_errno())
        ends = np.cumsum(array[at:stop, 1])
        done = int(np.searchsorted(ends, np.uint64(moved), side="right"))
        rest = moved - (int(ends[done - 1]) if done else 0)
        at += done
        if rest:
            array[at] = (int(array[at, 0]) + rest, int(array[at, 1]) - rest)


def place_of(role: str, apart: bool) -> str:
    """The address of a role. If the two are apart, this thread goes there."""
    if apart:
        enter(role)
    return SPACES[role][1] if apart else "127.0.0.1"


def target(pipe: Connection, apart: bool) -> None:
    """The other process: it owns the destination, grants it, and is the far end of the plain connection."""
    host = place_of("decode", apart)
    memory = np.zeros(SPACE, np.uint8)
    backends = {copy: open_backend("target", memory, host, copy=copy) for copy in (True, False)}
    with socket.create_server((host, 0)) as listener:
        pipe.send((os.getpid(), memory.ctypes.data, listener.getsockname()))
        pipe.send({copy: backend.descriptor() for copy, backend in backends.items()})
        plain, _ = listener.accept()
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for copy, descriptor in pipe.recv().items():
        backends[copy].connect("source", descriptor, ())
    pipe.send("ready")
    room = 0
    while (order := pipe.recv()) is not None:
        addresses, nbytes = order
        array = vectors(addresses, nbytes)
        granted = np.sort(addresses)
        for backend in backends.values():
            backend.revoke("source", room, 1)
            backend.grant("source", room + 1, 1, granted, np.full(len(granted), nbytes, np.uint64))
        room += 1
        pipe.send(room)
        move_all(libc.readv, plain, array)
        plain.send(b"\0")
    for backend in backends.values():
        backend.close()
    plain.close()


@dataclass
class Case:
    """One shape, and everything that is needed to move it in every way."""

    pid: int
    plain: socket.socket
    backends: dict[bool, TcpBackend]
    memory: npt.NDArray[np.uint8]
    other: npt.NDArray[np.uint8]
    blocks: Blocks
    local: U64
    remote: U64
    room: int = 0

    def memcpy(self) -> None:
        np.copyto(self.other[: self.blocks.total], self.memory[: self.blocks.total])

    def writev(self) -> None:
        for at in range(0, len(self.local), IOV_MAX):
            ours, theirs = self.local[at : at + IOV_MAX], self.remote[at : at + IOV_MAX]
            ends = ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs)
            assert libc.process_vm_writev(self.pid, *ends, 0) == int(ours[:, 1].sum())

    def sendmsg(self) -> None:
        move_all(libc.writev, self.plain, self.local)
        assert self.plain.recv(1)

    def copy(self) -> None:
        self._write(1, copy=True)

    def stream(self) -> None:
        self._write(STREAM, copy=True)

    def socket(self) -> None:
        self._write(1, copy=False)

    def _write(self, batches: int, *, copy: bool) -> None:
        batch = Batch(self.blocks, self.room, 1)
        waiting = []
        for number in range(batches + UNDER_WAY):
            if number < batches:
                waiting.append(self.backends[copy].submit("target", batch))
            if waiting and (number >= batches or len(waiting) == UNDER_WAY):
                oldest = waiting.pop(0)
                while oldest.outcome is None:
                    time.sleep(0.00005)
                assert oldest.outcome.ok, oldest.outcome


def place(count: int, nbytes: int, base: int, scattered: bool, random: np.random.Generator) -> U64:
    slots: U64 = np.arange(count, dtype=np.uint64)
    if scattered:
        slots = random.permutation(SPACE // (2 * nbytes))[:count].astype(np.uint64) * np.uint64(2)
    places: U64 = slots * np.uint64(nbytes) + np.uint64(base)
    return places


def measure(rounds: int, apart: bool) -> list[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, apart), daemon=True)
    process.start()
    host = place_of("prefill", apart)
    pid, base, listening = ours.recv()
    descriptors = ours.recv()
    plain = socket.create_connection(listening)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    random = np.random.default_rng(1)
    memory, other = random.integers(0, 255, SPACE, np.uint8), np.zeros(SPACE, np.uint8)
    backends = {copy: open_backend("source", memory, host, copy=copy) for copy in (True, False)}
    ours.send({copy: backend.descriptor() for copy, backend in backends.items()})
    for copy, backend in backends.items():
        backend.connect("target", descriptors[copy], [Region(base, SPACE)])
    ours.recv()
    results = []
    for scattered in (False, True):
        for count, nbytes in SHAPES:
            source = place(count, nbytes, memory.ctypes.data, scattered, random)
            destination = place(count, nbytes, base, scattered, random)
            zeros = np.zeros(count, np.uint32)
            blocks = Blocks(source, destination, np.full(count, nbytes, np.uint64), zeros, zeros)
            local, remote = vectors(source, nbytes), vectors(destination, nbytes)
            case = Case(pid, plain, backends, memory, other, blocks, local, remote)
            seconds: dict[str, list[float]] = {}
            for _ in range(WARM_UP + rounds):
                ours.send((destination, nbytes))
                case.room = ours.recv()
                for way in (case.memcpy, case.writev, case.sendmsg, case.copy, case.stream, case.socket):
                    start = time.perf_counter()
                    way()
                    seconds.setdefault(way.__name__, []).append(time.perf_counter() - start)
            results.append(summary(blocks, scattered, seconds))
    ours.send(None)
    for backend in backends.values():
        backend.close()
    plain.close()
    process.join(10)
    return results


def summary(blocks: Blocks, scattered: bool, seconds: dict[str, list[float]]) -> dict[str, Any]:
    best = {name: min(each[WARM_UP:]) / (STREAM if name == "stream" else 1) for name, each in seconds.items()}
    return {
        "blocks": blocks.count,
        "nbytes": int(blocks.nbytes[0]),
        "scattered": scattered,
        "GB/s": {name: blocks.total / each / 1e9 for name, each in best.items()},
        "of the floor": {name: best[floor] / best[way] for name, (floor, way) in RATIOS.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--namespaces", action="store_true", help="let two network namespaces stand for two hosts")
    arguments = parser.parse_args()
    with namespaces() if arguments.namespaces else contextlib.nullcontext():
        results = measure(arguments.rounds, arguments.namespaces)
    if arguments.json:
        json.dump(results, sys.stdout, indent=1)
        return
    ways, ratios = (list(results[0][name]) for name in ("GB/s", "of the floor"))
    print(f"{'GB/s':26}" + "".join(f"{name:>9}" for name in ways) + "".join(f"{name:>16}" for name in ratios))
    for result in results:
        order = "scattered" if result["scattered"] else "contiguous"
        print(
            f"{result['blocks']} x {result['nbytes'] >> 10} KiB {order}".ljust(26)
            + "".join(f"{result['GB/s'][name]:9.2f}" for name in ways)
            + "".join(f"{result['of the floor'][name]:16.0%}" for name in ratios)
        )


if __name__ == "__main__":
    main()
