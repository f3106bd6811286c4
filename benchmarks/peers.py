"""What a link holds and does for each of its peers, by which a fleet can be reckoned.

    python -m benchmarks.peers [--backend tcp] [--peers 200] [--layers 64] [--rest 10] [--json]

One link in this process meets so many links of another process: once as prefill, once as decode. With each, it hands
over one small request, so that the backends are connected as well. Counted is what each peer after the first adds to
this process: open files, threads, resident memory, memory that is locked or pinned for devices, processor time to
connect, and processor time at rest, in which there is nothing but signs of life, one a second in each direction.

``rooms`` are those that the link itself counted as succeeded. If one fails, or if a peer is missing, there is no row.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import statelink
from statelink import state

from .rows import show

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TOKENS = 16
PATIENCE = 300.0
REST = 10.0
"""Seconds for which the links rest."""
OTHER = {"prefill": "decode", "decode": "prefill"}
Pages = list[tuple[Any, Any]]
Row = dict[str, Any]


def pages_of(layers: int) -> Pages:
    """Keys and values of a model of many layers, and of few bytes."""
    return [(np.zeros((4, TOKENS, 1, 8), np.uint8), np.zeros((4, TOKENS, 1, 8), np.uint8)) for _ in range(layers)]


def opened(role: str, backend: str, name: str, pages: Pages) -> statelink.Link:
    """A link over these pages."""
    inventory = state.describe(name, [state.kv_pages(dict(enumerate(pages)), heads=1)])
    return statelink.open({"role": role, "backend": backend, "inspect": False}, inventory)


def begin(link: statelink.Link, role: str, room: int, peer: str) -> Any:
    """One side of a request; it need not wait for the other."""
    if role == "decode":
        return link.receive(room, peer, TOKENS, {"kv": [1]}, deadline=PATIENCE)
    sending = link.send(room, TOKENS, deadline=PATIENCE)
    sending.push({"kv": [0]})
    return sending


def finish(rooms: list[Any]) -> None:
    """Wait for requests, which succeed."""
    for room in rooms:
        room.wait(PATIENCE, quiesced=True)
        room.check()


def others(pipe: Connection, role: str, backend: str, count: int, layers: int) -> None:
    """The other process: many links over one memory. Each meets the link at the address that comes over the pipe."""
    unlimited()
    pages = pages_of(layers)
    links = [opened(role, backend, f"other-{number}", pages) for number in range(count)]
    pipe.send([link.address for link in links])
    address = pipe.recv()
    for part in (range(1), range(1, count)):
        pipe.recv()
        finish([begin(links[number], role, 1 + number, address) for number in part])
        pipe.send("met")
    pipe.recv()
    for link in links:
        link.close()


def unlimited() -> None:
    """Let this process open as many files as it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def held() -> dict[str, float]:
    """Files, threads, and KiB of memory of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "resident_KiB": float(status["VmRSS"].split()[0]),
        "locked_KiB": float(status["VmLck"].split()[0]) + float(status["VmPin"].split()[0]),
    }


def counted(link: statelink.Link, role: str, count: int) -> int:
    """How many rooms have succeeded, of a link that has met so many peers, each once."""
    seen = link.snapshot()
    rooms, peers = seen["totals"]["rooms"].get(role, {}), len(seen["peers"])
    if rooms != {"succeeded": count} or peers != count:
        sys.exit(f"{count} peers and rooms were asked for; the link counted {peers} peers, and the rooms {rooms}")
    return count


def measure(role: str, backend: str, count: int, layers: int, rest: float = REST) -> Row:
    """One link of a role, and so many peers beside the first."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, OTHER[role], backend, count + 1, layers)
    process = context.Process(target=others, args=arguments, name="peers", daemon=True)
    process.start()
    theirs.close()
    try:
        row = beside(ours, role, backend, count, layers, rest)
    except BaseException:
        process.kill()
        raise
    finally:
        process.join(PATIENCE)
        ours.close()
    if process.exitcode:
        sys.exit(f"the other process ended with {process.exitcode}")
    return row


def beside(ours: Connection, role: str, backend: str, count: int, layers: int, rest: float) -> Row:
    """One link, beside the process at the other end of the pipe."""
    pages = pages_of(layers)
    with opened(role, backend, role, pages) as link:
        addresses = ours.recv()
        ours.send(link.address)

        def meet(numbers: range) -> None:
            ours.send("meet")
            finish([begin(link, role, 1 + number, addresses[number]) for number in numbers])
            ours.recv()
            link.changes()

        meet(range(1))
        before, used = held(), time.process_time()
        meet(range(1, count + 1))
        connecting, after = time.process_time() - used, held()
        rooms = counted(link, role, count + 1)
        time.sleep(1.0)
        used = time.process_time()
        time.sleep(rest)
        resting = (time.process_time() - used) / rest
        ours.send("end")
    row: Row = {"peers": count, "backend": backend, "as": role, "layers": layers, "rooms": rooms}
    row |= {f"{name}_a_peer": round((after[name] - before[name]) / count, 2) for name in before}
    row["connect_processor_ms_a_peer"] = round(connecting / count * 1e3, 2)
    return row | {"rest_processor_ms_a_second_a_peer": round(resting / count * 1e3, 3)}


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["tcp"])
    parser.add_argument("--peers", type=int, default=200)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--rest", type=float, default=REST, help="seconds for which the links rest")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    unlimited()
    for backend in given.backend:
        for role in ("prefill", "decode"):
            show(measure(role, backend, given.peers, given.layers, given.rest), given.json)


if __name__ == "__main__":
    main()
