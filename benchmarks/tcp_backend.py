"""Speed of the embedded backend between two processes of this machine, against what the kernel gives.

    python -m benchmarks.tcp_backend [--rounds 15] [--json]

Each round runs, one right after the other, for every shape:

    memcpy    one numpy copy of as many bytes, within one process
    writev    process_vm_writev into the other process, 1,024 vectors a call, prepared beforehand
    sendmsg   one TCP connection: sendmsg of 1,024 vectors a call, readv of the same, one byte back
    copy      the backend, its same-host path, from ``submit`` to the outcome
    socket    the backend, same_host_copy off, likewise

The blocks are ``contiguous`` at both ends, or ``scattered``: both ends in random order, no two neighbours. Only the
ratios within one run mean anything on a shared machine. They are medians over rounds of the per-round ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from statelink.backend import BackendContext, Batch, Blocks, Op, Region
from statelink.tcp import TcpBackend

U64 = npt.NDArray[np.uint64]

SHAPES = ((64, 64 << 10), (1024, 16 << 10), (4096, 4 << 10), (16384, 1 << 10))
SPACE = 128 << 20
IOV_MAX = 1024

libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_writev.restype = ctypes.c_ssize_t
libc.process_vm_writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong) * 1 + (
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
libc.writev.restype = libc.readv.restype = ctypes.c_ssize_t
libc.writev.argtypes = libc.readv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def open_backend(link: str, memory: npt.NDArray[np.uint8], copy: bool) -> TcpBackend:
    options = TcpBackend.Options(same_host_copy=copy)
    backend = TcpBackend(BackendContext(options=options, link=link))
    backend.register([Region(memory.ctypes.data, memory.nbytes)])
    return backend


def vectors(addresses: U64, nbytes: int) -> U64:
    return np.stack((addresses, np.full(len(addresses), nbytes, np.uint64)), axis=1)


def move_all(call: Any, array: U64) -> None:
    """Run a vectored socket call over all of ``array``, resuming partial results; plain, blocking."""
    array = array.copy()
    at = 0
    while at < len(array):
        stop = min(at + IOV_MAX, len(array))
        moved = call(array[at:].ctypes.data, stop - at)
        assert moved > 0, os.strerror(ctypes.get_errno())
        ends = np.cumsum(array[at:stop, 1])
        done = int(np.searchsorted(ends, np.uint64(moved), side="right"))
        rest = moved - (int(ends[done - 1]) if done else 0)
        at += done
        if rest:
            array[at] = (int(array[at, 0]) + rest, int(array[at, 1]) - rest)


def target(pipe: Connection) -> None:
    """The other process: it owns the destination, grants it, and is the far end of the plain socket."""
    memory = np.zeros(SPACE, np.uint8)
    backends = {copy: open_backend("target", memory, copy) for copy in (True, False)}
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((os.getpid(), memory.ctypes.data, listener.getsockname()[1]))
    pipe.send({copy: backend.descriptor() for copy, backend in backends.items()})
    plain, _ = listener.accept()
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for copy, (descriptor, regions) in pipe.recv().items():
        backends[copy].connect("source", descriptor, regions)
        backends[copy].grant("source", 1, 1, np.array([memory.ctypes.data], np.uint64), np.array([SPACE], np.uint64))
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        array = vectors(*order)
        pipe.send("ready")
        move_all(lambda address, count: libc.readv(plain.fileno(), address, count), array)
        plain.send(b"\0")
    for backend in backends.values():
        backend.close()


def place(count: int, nbytes: int, base: int, scattered: bool, random: np.random.Generator) -> U64:
    if not scattered:
        return base + nbytes * np.arange(count, dtype=np.uint64)
    slots = random.permutation(SPACE // (2 * nbytes))[:count].astype(np.uint64)
    return np.uint64(base) + slots * np.uint64(2 * nbytes)


def measure(rounds: int) -> list[dict[str, Any]]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs,), daemon=True)
    process.start()
    pid, base, port = ours.recv()
    descriptors = ours.recv()
    plain = socket.create_connection(("127.0.0.1", port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    random = np.random.default_rng(1)
    memory = random.integers(0, 255, SPACE, np.uint8)
    other = np.zeros(SPACE, np.uint8)
    backends = {copy: open_backend("source", memory, copy) for copy in (True, False)}
    ours.send({copy: (backend.descriptor(), ()) for copy, backend in backends.items()})
    for copy, backend in backends.items():
        backend.connect("target", descriptors[copy], [Region(base, SPACE)])
    ours.recv()

    def backend_write(copy: bool, batch: Batch) -> None:
        transfer = backends[copy].submit("target", batch)
        while transfer.outcome is None:
            time.sleep(0.00005)
        assert transfer.outcome.ok, transfer.outcome

    def writev(local: U64, remote: U64) -> None:
        for at in range(0, len(local), IOV_MAX):
            part, far = local[at : at + IOV_MAX], remote[at : at + IOV_MAX]
            moved = libc.process_vm_writev(pid, part.ctypes.data, len(part), far.ctypes.data, len(far), 0)
            assert moved == int(part[:, 1].sum()), os.strerror(ctypes.get_errno())

    def sendmsg(local: U64) -> None:
        move_all(lambda address, count: libc.writev(plain.fileno(), address, count), local)
        assert plain.recv(1)

    results = []
    for scattered in (False, True):
        for count, nbytes in SHAPES:
            source = place(count, nbytes, memory.ctypes.data, scattered, random)
            destination = place(count, nbytes, base, scattered, random)
            zeros = np.zeros(count, np.uint32)
            blocks = Blocks(source, destination, np.full(count, nbytes, np.uint64), zeros, zeros)
            batch = Batch(Op.WRITE, blocks, 1, 1)
            local, remote = vectors(source, nbytes), vectors(destination, nbytes)
            total = count * nbytes
            seconds: dict[str, list[float]] = {}
            for round_ in range(rounds + 2):
                ours.send((destination, nbytes))
                ours.recv()
                for name, run in (
                    ("memcpy", lambda: np.copyto(other[:total], memory[:total])),
                    ("writev", lambda: writev(local, remote)),
                    ("sendmsg", lambda: sendmsg(local)),
                    ("copy", lambda: backend_write(True, batch)),
                    ("socket", lambda: backend_write(False, batch)),
                ):
                    start = time.perf_counter()
                    run()
                    if round_ >= 2:
                        seconds.setdefault(name, []).append(time.perf_counter() - start)
            result: dict[str, Any] = {"blocks": count, "nbytes": nbytes, "scattered": scattered}
            result["GB/s"] = {name: total / statistics.median(times) / 1e9 for name, times in seconds.items()}
            result["copy/writev"] = ratio(seconds["writev"], seconds["copy"])
            result["copy/memcpy"] = ratio(seconds["memcpy"], seconds["copy"])
            result["socket/sendmsg"] = ratio(seconds["sendmsg"], seconds["socket"])
            results.append(result)
    ours.send(None)
    for backend in backends.values():
        backend.close()
    process.join(10)
    return results


def ratio(floor: list[float], ours: list[float]) -> float:
    return statistics.median(f / o for f, o in zip(floor, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = measure(arguments.rounds)
    if arguments.json:
        json.dump(results, sys.stdout, indent=1)
        return
    names = list(results[0]["GB/s"])
    ratios = ("copy/writev", "copy/memcpy", "socket/sendmsg")
    print(f"{'':26}{'GB/s':^{9 * len(names)}}  of the floor")
    print(f"{'blocks':26}" + "".join(f"{name:>9}" for name in names) + "".join(f"{name:>16}" for name in ratios))
    for result in results:
        shape = (
            f"{result['blocks']} x {result['nbytes'] >> 10} KiB {'scattered' if result['scattered'] else 'contiguous'}"
        )
        print(
            f"{shape:26}"
            + "".join(f"{result['GB/s'][name]:9.2f}" for name in names)
            + "".join(f"{result[name]:15.0%} " for name in ratios)
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
