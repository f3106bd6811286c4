"""What of a long line requests fill, beside what plain streams fill of it, and how late control messages are meanwhile.

    python -m benchmarks.long_line [--backend tcp nixl mooncake] [--rtt MS] [--lost OF_1000] [--rounds 5] [--json]

Two network namespaces stand for two hosts. Between them is a line of 1 Gbit/s with a delay, losses, and a queue of
100 ms. Needs root, ``ip``, the kernel's TUN devices, and a C compiler for the program that carries the packets.

One request after the other moves, of 8 MiB and then of 128 MiB, in turn with as many bytes over 1, 4 and 8 plain
streams that share them. Decode asks with one small message, in either case, and the time ends when everything is there.
Every stream and link is connected and has moved as much before, and then was idle for a second.

Printed per run are the medians as shares of the line's rate; for the requests also as a share of the best number of
plain streams, in pairs; and how long control messages take until they are answered, alone and during 256 MiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import state

from .namespaces import SPACES, Line, enter, joined, missing
from .pairs import Ratio, in_turn, ratio
from .rows import show

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LINES = Line(1), Line(30), Line(30, lost=1), Line(100)
STREAMS = 1, 4, 8
SIZES = 8, 128
"""Of a request, in MiB."""
SHARE = 2
"""So many of the largest move while control messages are timed."""
PAGE, HEADS, DIM, LAYERS = 16, 8, 64, 32
"""A page of all layers is 1 MiB."""
MIB = 1 << 20
IDLE = 1.0
"""Seconds without a byte before each time. TCP takes a stream for idle after its time-out, which is less."""
OPTIONS: dict[str, dict[str, Any]] = {
    "tcp": {"same_host_copy": False},
    "nixl": {"ucx": {"TLS": "tcp"}},
    "mooncake": {"protocol": "tcp"},
}
"""With these, a backend uses the line, although both ends are on one machine."""
PINGS = 20
PATIENCE = 120.0
STREAM_PORT = 7400


def fill(pages: int, role: str) -> tuple[statelink.state.Inventory, Any]:
    """Pools of so many pages, and their arrays. Prefill's say in each element which page it is of, from 1 on."""
    shape = (pages, PAGE, HEADS, DIM)
    kv = {layer: (np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)) for layer in range(LAYERS)}
    if role == "prefill":
        for each in (one for pair in kv.values() for one in pair):
            each[:] = np.arange(1, pages + 1, dtype=np.uint16)[:, None, None, None]
    return state.describe(role, [state.kv_pages(kv, heads=HEADS)]), kv


def opened(role: str, backend: str, inventory: statelink.state.Inventory) -> statelink.Link:
    """A link in the namespace of its role, with the defaults."""
    config = {"role": role, "backend": backend, "listen": f"tcp://{SPACES[role][1]}:0", "insecure": True}
    return statelink.open(config | {"options": OPTIONS.get(backend, {})}, inventory)


class Asked(NamedTuple):
    """A request that prefill sends, or refuses."""

    room: int
    pages: range
    refused: bool = False


def prefill(backend: str, pages: int, pipe: Connection) -> None:
    """The sending process: answers streams, and requests as it is told."""
    enter("prefill")
    inventory, _ = fill(pages, "prefill")
    with socket.create_server((SPACES["prefill"][1], STREAM_PORT)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        with opened("prefill", backend, inventory) as link:
            pipe.send(link.address)
            while (asked := pipe.recv()) is not None:
                sending = link.send(asked.room, PAGE * len(asked.pages))
                if asked.refused:
                    sending.abort("it only shows how long an answer takes")
                else:
                    sending.push({"kv": list(asked.pages)})


def accept(server: socket.socket) -> None:
    """Serve streams until the process ends."""
    while True:
        stream, _ = server.accept()
        threading.Thread(target=answer, args=(stream,), daemon=True).start()


def answer(stream: socket.socket) -> None:
    """Send as many bytes as each message of 8 bytes says."""
    part = bytes(MIB)
    while wanted := stream.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(wanted, "little")
        while left:
            left -= stream.send(part[:left])


class Streams:
    """Plain streams that share what they move."""

    def __init__(self, number: int) -> None:
        self._streams = [socket.create_connection((SPACES["prefill"][1], STREAM_PORT)) for _ in range(number)]

    def move(self, nbytes: int) -> float:
        """Have so many bytes sent; the seconds."""
        share = nbytes // len(self._streams)
        threads = [threading.Thread(target=self._move, args=(each, share)) for each in self._streams]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def _move(self, stream: socket.socket, nbytes: int) -> None:
        stream.sendall(nbytes.to_bytes(8, "little"))
        part = memoryview(bytearray(MIB))
        while nbytes:
            nbytes -= stream.recv_into(part[:nbytes])


class Requests:
    """The receiving side of requests.

    Args:
        link: Its link.
        prefill: To the sending process.
    """

    def __init__(self, link: statelink.Link, prefill: Connection) -> None:
        self._link = link
        self._prefill = prefill
        self._address = prefill.recv()
        self._room = 0

    def begin(self, pages: range, *, refused: bool = False) -> statelink.Receiving:
        """Ask for a request."""
        self._room += 1
        self._prefill.send(Asked(self._room, pages, refused))
        return self._link.receive(self._room, self._address, PAGE * len(pages), {"kv": list(pages)}, deadline=PATIENCE)

    def move(self, nbytes: int) -> float:
        """Receive a request of so many bytes; the seconds."""
        began = time.perf_counter()
        receiving = self.begin(range(nbytes // MIB))
        receiving.wait()
        receiving.check()
        return time.perf_counter() - began

    def ping(self) -> float:
        """Ask for a request that prefill refuses: its answer is a control message. Its seconds."""
        began = time.perf_counter()
        receiving = self.begin(range(1), refused=True)
        if receiving.wait() is not statelink.Status.FAILED:
            raise SystemExit("a request succeeded that prefill refuses")
        return time.perf_counter() - began

    def pings_beside(self, pages: int, number: int) -> list[float]:
        """Ping during so many requests of so many pages, which do not share memory."""
        large = [self.begin(range(pages * which, pages * (which + 1))) for which in range(number)]
        took: list[float] = []
        while any(each.status not in (statelink.Status.SUCCEEDED, statelink.Status.FAILED) for each in large):
            took.append(self.ping())
        for each in large:
            each.check()
        return took


def decode(backend: str, line: Line, sizes: Sequence[int], rounds: int, told: Connection, pipe: Connection) -> None:
    """The receiving process, which measures, and tells its row."""
    enter("decode")
    inventory, kv = fill(SHARE * sizes[-1], "decode")
    row: dict[str, Any] = {"line": str(line), "mbit": line.mbit, "backend": backend}
    with opened("decode", backend, inventory) as link:
        requests = Requests(link, told)
        streams = {number: Streams(number) for number in STREAMS}
        requests.move(MIB)
        alone = [requests.ping() for _ in range(PINGS)]
        for mib in sizes:
            row |= shares({number: each.move for number, each in streams.items()}, requests.move, line, mib, rounds)
        beside = requests.pings_beside(sizes[-1], SHARE)
        told.send(None)
    if any((each[:, 0, 0, 0] != np.arange(1, len(each) + 1)).any() for pair in kv.values() for each in pair):
        raise SystemExit(f"{backend} moved other bytes")
    row |= {"answer_ms": milliseconds(statistics.median(alone)), "answer_beside_ms": milliseconds(max(beside))}
    pipe.send(row | {"answer_may_take_ms": 2 * line.rtt_ms + line.queue_ms})


def shares(
    plain: dict[int, Callable[[int], float]], ours: Callable[[int], float], line: Line, mib: int, rounds: int
) -> dict[str, Any]:
    """Shares of the line's rate, and of what the best number of streams reaches, for so many MiB."""

    def way(move: Callable[[int], float]) -> Callable[[], float]:
        def timed() -> float:
            time.sleep(IDLE)
            return move(mib * MIB)

        return timed

    ways = {"": way(ours), **{f"plain_{number}": way(move) for number, move in plain.items()}}
    took = list(in_turn(ways, rounds, warm=1))
    median = {name: statistics.median(each[name] for each in took) for name in ways}
    best = min((name for name in ways if name), key=lambda name: median[name])
    least = mib * MIB * 8 / (line.mbit * 1e6)
    found: dict[str, Any] = {f"{name or 'ours'}_{mib}": round(least / median[name], 3) for name in ways}
    of_best: Ratio = ratio([each[best] for each in took], [each[""] for each in took])
    return found | {f"of_best_{mib}": of_best}


def milliseconds(seconds: float) -> float:
    """Rounded."""
    return round(seconds * 1e3, 1)


def measure(backend: str, line: Line, rounds: int, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """One run over one line, with requests of so many MiB."""
    context = multiprocessing.get_context("spawn")
    with joined(line):
        ours, theirs = context.Pipe()
        found, tells = context.Pipe(duplex=False)
        processes = [
            context.Process(target=prefill, args=(backend, SHARE * sizes[-1], theirs), daemon=True),
            context.Process(target=decode, args=(backend, line, sizes, rounds, ours, tells), daemon=True),
        ]
        for process in processes:
            process.start()
        for end in (ours, theirs, tells):
            end.close()  # so that each process, and this one, sees that another has ended
        try:
            row: dict[str, Any] = found.recv()
            for process in processes:
                process.join(PATIENCE)
        except EOFError:
            raise SystemExit(f"{backend} has no row for {line}: a process failed") from None
        finally:
            for process in processes:
                process.kill()
                process.join()
    return row


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["tcp", "nixl", "mooncake"])
    parser.add_argument("--rtt", type=float, help="milliseconds of the only line")
    parser.add_argument("--lost", type=float, default=0, help="of 1,000 packets of it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    problem = missing()
    if problem:
        parser.error(problem)
    lines = LINES if arguments.rtt is None else [Line(arguments.rtt, arguments.lost)]
    for line in lines:
        for backend in arguments.backend:
            show(measure(backend, line, arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
