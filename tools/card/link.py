"""A link between two processes: the bytes, GB/s, and by which transport of UCX they went.

    python -m tools.card.link cuda cuda [--backend nixl] [-o 'ucx={"TLS": "tcp,cuda_copy"}'] [-o num_threads=8]
                                        [--mib 512] [--page-kib 64] [--rounds 10] [--staged]
                                        [--allocator expandable_segments:True] [--device 1] [--verify]

The two words say where prefill and decode have their pools: ``cuda`` or ``dram``. ``--allocator`` is a setting of
torch's allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import statelink
from statelink import state

from .device import Buffer, Bytes, Card
from .pair import PAGE_TOKENS, both, succeeded
from .say import answer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

HEADS, PAGES = 8, 128
MIB = 1 << 20


class Pools:
    """The pools of one side: keys and values of some layers, in host memory or on the card."""

    def __init__(self, card: Card | None, job: dict[str, Any]) -> None:
        page = job["page"]
        layers = max(1, job["nbytes"] // (2 * PAGES * page))
        shape = (PAGES, PAGE_TOKENS, HEADS, page // (PAGE_TOKENS * HEADS))
        self.card, self.nbytes = card, PAGES * page
        self.on_card: list[Buffer] = [card.buffer(self.nbytes) for _ in range(2 * layers)] if card else []
        self.on_host: list[Bytes] = [] if card else [np.zeros(self.nbytes, np.uint8) for _ in range(2 * layers)]
        kind = card.kind if card else "dram"
        addresses = [each.address for each in self.on_card] or [int(each.ctypes.data) for each in self.on_host]
        described = [state.Memory.pointer(each, shape, "uint8", 1, kind=kind) for each in addresses]
        pairs = {layer: (described[2 * layer], described[2 * layer + 1]) for layer in range(layers)}
        self.parts = [state.kv_pages(pairs, heads=HEADS)]

    def write(self, number: int, data: Bytes) -> None:
        """Set the bytes of one array."""
        if self.card is not None:
            self.card.write(self.on_card[number], data)
        else:
            self.on_host[number][:] = data

    def read(self, number: int) -> Bytes:
        """The bytes of one array."""
        return self.card.read(self.on_card[number]) if self.card is not None else self.on_host[number]

    def __len__(self) -> int:
        return len(self.on_card) or len(self.on_host)


def source(number: int, nbytes: int) -> Bytes:
    """What prefill has in one array. Both sides can compute it."""
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def side(role: str, pipe: Connection, job: dict[str, Any]) -> dict[str, Any]:
    """One side."""
    card = Card(job["device"]) if job[role] == "cuda" else None
    pools = Pools(card, job)
    if role == "prefill":
        for number in range(len(pools)):
            pools.write(number, source(number, pools.nbytes))
    pipe.send("the pools are there")
    pipe.recv()
    free = card.free() if card else None
    pipe.send("looked")  # so that neither has opened its link when the other one looks
    pipe.recv()
    config = {"role": role, "backend": job["backend"], "options": job["options"]}
    if job["staged"]:
        config["staging"] = {"mode": "always"}
    if job["verify"]:
        config["verify"] = "digest"
    pages = np.random.default_rng(5 if role == "prefill" else 6).permutation(PAGES)
    computed = np.random.default_rng(5).permutation(PAGES)
    tokens, items = PAGES * PAGE_TOKENS, {"kv": pages}
    found: dict[str, Any] = {}
    with statelink.open(config, state.describe(role, pools.parts, model="link")) as link:
        if role == "prefill":
            pipe.send(link.address)
            while room := pipe.recv():
                sending = link.send(room, tokens)
                sending.push(items)
                succeeded(sending)
        else:
            address, until = pipe.recv(), time.perf_counter() + job["most"]
            times: list[float] = []
            # The first room connects the two. It counts for itself.
            for room in range(1, job["rounds"] + 2):
                if len(times) > 1 and time.perf_counter() > until:
                    break
                before, began = over_loopback(), time.perf_counter()
                pipe.send(room)
                receiving = link.receive(room, address, tokens, items)
                succeeded(receiving)
                times.append(time.perf_counter() - began)
                found["loopback"] = over_loopback() - before
            pipe.send(0)
            report = receiving.report
            found["allocated"] = link.snapshot()["memory"]
            found["transports"] = ", ".join(report.transports.values())
            found["nbytes"] = sum(each.nbytes for each in report.moved.values())
            found["blocks"] = sum(each.blocks for each in report.moved.values())
            found["first"], found["times"] = times[0], times[1:]
            found["equal"] = all(
                np.array_equal(
                    pools.read(number).reshape(PAGES, -1)[pages],
                    source(number, pools.nbytes).reshape(PAGES, -1)[computed],
                )
                for number in range(len(pools))
            )
        pipe.send("moved")
        pipe.recv()
        if card is not None and free is not None and (left := card.free()) is not None:
            found["taken"] = free - left
        if role == "decode" and shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            found["processes"] = "; ".join((said.stdout or said.stderr).split("\n")).strip("; ")
        found["pid"] = os.getpid()
        found["contexts"] = card.contexts() if card is not None else []
        found["threads"] = len(os.listdir("/proc/self/task"))
        pipe.send("end")  # nobody closes before the other one has looked
        pipe.recv()
    return found


def over_loopback() -> int:
    """Bytes that the loopback interface has carried so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def protocols(log: str) -> dict[str, str]:
    """What UCX said about its puts from or to memory of a card: which transports it takes for each pair of memories."""
    rows: dict[str, Counter[str]] = {}
    about = ""
    for line in log.splitlines():
        text = line.partition("|")[2].rpartition("|")[0].strip()
        if title := re.match(r"remote memory write by ucp_put\*\S* from (.+)", text):
            about = title[1] if "cuda" in title[1] else ""
        elif re.match(r"(active message|tagged|remote memory read|stream|rendezvous|atomic)", text):
            about = ""
        elif about and (row := re.match(r"(\S+)\s+\|\s+(.+?)\s+\|\s+(\S+)", text)) and row[1] != "Range":
            rows.setdefault(about, Counter())[f"{row[3]} ({row[2]})"] += 1
    return {name: ", ".join(found) for name, found in rows.items()}


def main() -> int:
    """Run it, and say what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefill", choices=("cuda", "dram"))
    parser.add_argument("decode", choices=("cuda", "dram"))
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=JSON", help="of the backend")
    parser.add_argument("--allocator", default="")
    parser.add_argument("--device", type=int, default=0, help="number of the card")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--page-kib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10, help="fewer if they take long")
    parser.add_argument("--staged", action="store_true")
    parser.add_argument("--verify", action="store_true", help="let both sides compare digests of what they have")
    parser.add_argument("--seconds", type=float, default=40.0)
    arguments = parser.parse_args()
    job = {
        **{
            name: getattr(arguments, name)
            for name in ("prefill", "decode", "backend", "rounds", "staged", "device", "verify")
        },
        "options": {key: json.loads(value) for key, _, value in (each.partition("=") for each in arguments.options)},
        "nbytes": arguments.mib * MIB,
        "most": arguments.seconds / 3,
        "page": arguments.page_kib << 10,
    }
    os.environ["UCX_PROTO_INFO"] = "y"
    if arguments.allocator:  # of the processes that are started below; torch has had both names
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = arguments.allocator
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        kept = os.dup(1)
        sys.stdout.flush()
        os.dup2(log.fileno(), 1)  # the libraries' words, of both sides
        try:
            found, failed = both(side, job, arguments.seconds), ""
        except RuntimeError as error:
            found, failed = {}, str(error)
        finally:
            os.dup2(kept, 1)
            log.seek(0)
            said = log.read()
            print(said, flush=True)
    for about, transports in protocols(said).items():
        answer(f"UCX's choice from {about}", transports)
    if failed:
        answer("failed", failed)
        return 1
    decode = found["decode"]
    answer("every byte is right", decode["equal"])
    took, nbytes, blocks = statistics.median(decode["times"]), decode["nbytes"], decode["blocks"]
    answer(f"{nbytes >> 20} MiB in {blocks} blocks", round(nbytes / took / 1e9, 2), "GB/s")
    answer(f"time of a room, the median of {len(decode['times'])}", round(took * 1e3, 2), "ms")
    answer("time of a block", round(took / max(1, blocks) * 1e6, 2), "µs")
    answer("time of the first room, which connects", round(decode["first"] * 1e3, 1), "ms")
    answer("share that went over the loopback interface", round(decode["loopback"] / max(1, nbytes), 2))
    answer("transport, as the report says", decode["transports"] or "unknown")
    for kind, memory in decode["allocated"].items():
        answer(f"how {kind} of decode was allocated", ", ".join(memory["allocated"]) or "nobody knows")
    if "taken" in decode:
        answer("memory of the card that both links took beside the pools", round(decode["taken"] / MIB, 1), "MiB")
    for role in ("prefill", "decode"):
        answer(
            f"{role}: process, and cards on which it has the primary context",
            [found[role]["pid"], *found[role]["contexts"]],
        )
    if "processes" in decode:
        answer("nvidia-smi: process, memory", decode["processes"])
    answer("threads of decode", decode["threads"])
    return 0 if decode["equal"] else 1


if __name__ == "__main__":
    # What is sent to a process names its module, which is `__main__` there, too.
    from tools.card import link

    sys.exit(link.main())
