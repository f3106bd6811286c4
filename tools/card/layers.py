"""Layers that leave while a forward pass runs: how long it takes, and what is left after it, for groups of layers.

    python -m tools.card.layers [--layers 32] [--ms 3] [--mib 8] [--group 0 4 1] [--rounds 10] [--backend nixl]

No engine runs. A layer is a sequence of kernels: products of matrices that take ``--ms`` milliseconds, and then those
that write ``--mib`` MiB of keys and values. As an engine does, the thread launches all of them far ahead of the card,
records an event behind each group of layers, and pushes the group with it. Without torch that reaches the card, the
stream only waits, so that nothing competes for the card. Every byte is compared.

For each way of pushing, all in turn: everything in one push after the last layer, groups of so many layers, and, for a
group of 0, those of `statelink.layer_groups`, which the adapters push.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import state

from .device import Card, cuda_torch
from .pair import PAGE_TOKENS, both, succeeded
from .say import answer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from statelink import Sending

PAGES, HEADS, MIB = 64, 8, 1 << 20
ADAPTERS = 0


class Forward(NamedTuple):
    """A forward pass: when it began, when all of it was launched, and when it had ended, in seconds of one clock."""

    began: float
    launched: float
    ended: float


def ends_of(group: int, layers: int) -> tuple[int, ...]:
    """After how many layers a group ends."""
    return statelink.layer_groups(layers) if group == ADAPTERS else (*range(group, layers, group), layers)


def forward(
    card: Card, arrays: list[Any], byte: int, seconds: float, sending: Sending, ends: tuple[int, ...]
) -> Forward:
    """Launch all layers, push each group of them, and wait for the card."""
    items, tokens, first = {"kv": np.random.default_rng(1).permutation(PAGES)}, PAGES * PAGE_TOKENS, 0
    began = time.monotonic()
    for layer, pair in enumerate(arrays, 1):
        card.compute(seconds)
        event = card.late(pair, byte, 0.0)
        if layer in ends:
            sending.push(items, span=(0, tokens), layers=(first, layer), ready=event, last=layer == len(arrays))
            first = layer
    launched = time.monotonic()
    card.finish()
    return Forward(began, launched, time.monotonic())


def side(role: str, pipe: Connection, job: dict[str, Any]) -> list[Any]:
    """One side. Prefill returns its forward passes; decode when each request was there, and its wrong bytes."""
    card, layers, nbytes = Card(), job["layers"], job["nbytes"] // 2
    shape = (PAGES, PAGE_TOKENS, HEADS, nbytes // (PAGES * PAGE_TOKENS * HEADS))
    arrays = [[card.buffer(nbytes) for _ in range(2)] for _ in range(layers)]
    described = [
        [state.Memory.pointer(each.address, shape, "uint8", 1, kind=card.kind) for each in pair] for pair in arrays
    ]
    pairs = {layer: (keys, values) for layer, (keys, values) in enumerate(described)}
    inventory = state.describe(role, [state.kv_pages(pairs, heads=HEADS)], model="layers")
    tokens, found = PAGES * PAGE_TOKENS, list[Any]()
    with statelink.open({"role": role, "backend": job["backend"]}, inventory) as link:
        if role == "prefill":
            pipe.send(link.address)
        address = pipe.recv() if role == "decode" else ""
        for room in range(1, (job["rounds"] + 1) * len(job["groups"]) + 1):
            byte = room % 200 + 1
            if role == "prefill":
                sending = link.send(room, tokens)
                pipe.recv()
                end = time.monotonic() + 30
                while sending.prefix is None and time.monotonic() < end:
                    time.sleep(0.001)
                group = job["groups"][(room - 1) % len(job["groups"])]
                found.append(forward(card, arrays, byte, job["seconds"], sending, ends_of(group, layers)))
                succeeded(sending)
            else:
                receiving = link.receive(room, address, tokens, {"kv": np.random.default_rng(2).permutation(PAGES)})
                pipe.send("decode has asked")
                succeeded(receiving)
                arrived = time.monotonic()
                found.append((arrived, sum(card.differing(pair, byte) for pair in arrays)))
            pipe.send(room)  # both go on together
            pipe.recv()
    # The first of each connects, and measures what the kernels take.
    return found[len(job["groups"]) :]


def main() -> int:
    """Run it, and say what it found. An error if a byte was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ms", type=float, default=3.0, help="milliseconds of a layer's kernels")
    parser.add_argument("--mib", type=int, default=8, help="MiB that a layer writes")
    parser.add_argument("--group", type=int, nargs="+", default=[ADAPTERS, 4, 1], help="layers of a group")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--seconds", type=float, default=75.0)
    arguments = parser.parse_args()
    layers, groups = arguments.layers, [arguments.layers, *arguments.group]
    job = {
        "layers": layers,
        "seconds": arguments.ms / 1e3,
        "nbytes": arguments.mib * MIB,
        "groups": groups,
        "rounds": arguments.rounds,
        "backend": arguments.backend,
    }
    found = both(side, job, arguments.seconds)
    answer("kernels of a layer", "products of matrices" if cuda_torch() else "none: the stream waits")
    rooms = [*zip(found["prefill"], found["decode"], strict=True)]
    for number, group in enumerate(groups):
        name = f"groups of {group}" if 0 < group < layers else "one push" if group else "the adapters' groups"
        passes = [(Forward(*each), arrived) for each, (arrived, _) in rooms[number :: len(groups)]]

        def median(what: str, times: list[float], name: str = name) -> None:
            answer(f"{name}: {what}", round(statistics.median(times) * 1e3, 2), "ms")

        median("forward pass", [each.ended - each.began for each, _ in passes])
        median("launching it", [each.launched - each.began for each, _ in passes])
        median("left after it", [arrived - each.ended for each, arrived in passes])
    bad = sum(wrong > 0 for _, (_, wrong) in rooms)
    answer("rooms with wrong bytes", f"{bad} of {len(rooms)}")
    return 1 if bad else 0


if __name__ == "__main__":
    # What is sent to a process names its module, which is `__main__` there, too.
    from tools.card import layers

    sys.exit(layers.main())
