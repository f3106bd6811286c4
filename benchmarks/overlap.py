"""How much of a transfer prefill's forward pass hides: the demo's model over a link of a limited rate.

    python -m benchmarks.overlap [--mbit 20 50 100 1000] [--tokens 512] [--rounds 10] [--out build/bench]

Needs root, ``ip`` and ``tc``: prefill and decode run in two network namespaces, and what prefill sends is shaped. Each
round computes one prompt for each way of pushing, one right after the other:

    at the end   everything, after the whole prompt
    chunks       each chunk of 64 tokens, after its forward pass
    layers       each layer of each chunk, during the forward pass

What is shown is the time from the end of prefill's forward pass until the request has succeeded on decode.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import statelink
from statelink.testing.process import Process

from .namespaces import SPACES, namespaces, run
from .rows import show

WAYS = ("at the end", "chunks", "layers")


def pools_of(role: str, tokens: int) -> tuple[Any, Any, statelink.Link]:
    """The demo's model, its pools, and a link over them that others reach from another namespace."""
    from statelink_demo.engine import build_model
    from statelink_demo.pools import StatePools
    from statelink_demo.workers import describe_pools

    model = build_model(0)
    pools = StatePools(model.config, pages=2 * (tokens // StatePools.page_size + 1), slots=4, seed=len(role))
    address = SPACES[role][1]
    config: dict[str, Any] = {"role": role, "backend": "tcp", "listen": f"tcp://{address}:0", "insecure": True}
    config["options"] = {"same_host_copy": False}  # all bytes go through the network
    return model, pools, statelink.open(config, describe_pools(role, pools, "weights of seed 0"))


class Side:
    """What lives in a process in a namespace: the pools of one side, and its link."""

    def __init__(self, role: str, tokens: int) -> None:
        self.model, self.pools, self.link = pools_of(role, tokens)
        self.tokens = tokens
        self.prompt = random.Random(1).choices(range(self.model.config.vocab_size), k=tokens)

    def address(self) -> str:
        return self.link.address

    def close(self) -> None:
        self.link.close()

    def receive(self, room: int, peer: str) -> float:
        """Receive one request; when it had arrived."""
        held = self.pools.allocate(self.tokens)
        receiving = self.link.receive(room, peer, self.tokens, held)
        receiving.wait(120)
        arrived = time.monotonic()
        receiving.check()
        self.pools.release(held)
        return arrived

    def serve(self, room: int, way: str) -> float:
        """Compute a prompt, and push it in one of the ways; when its forward pass ended."""
        from statelink_demo.engine import Prefilling
        from statelink_demo.pools import METADATA

        request = Prefilling(self.model, self.pools, room, self.prompt)
        sending, pushed, done = self.link.send(room, self.tokens), 0, False
        while not done:
            span = request.span
            push_layer = partial(self.push_layer, sending, request.held, span) if way == "layers" else None
            done = request.step(push_layer)
            if way == "chunks" and not done:
                sending.push(self.items(request.held, span), span=span, last=False)
                pushed = span[1]
        computed = time.monotonic()
        rest: dict[str, Sequence[int]] = {METADATA: request.held[METADATA]}
        if way != "layers":
            rest |= self.items(request.held, (pushed, self.tokens))
        sending.push(rest, span=(pushed, self.tokens), last=True)
        sending.wait(120, quiesced=True)
        sending.check()
        self.pools.release(request.held)
        return computed

    def items(self, held: Any, span: tuple[int, int]) -> dict[str, Sequence[int]]:
        """What a push of this span names. The recurrent state is final at the end of the prompt."""
        from statelink_demo.pools import KV, MAMBA

        start, stop = span
        found: dict[str, Sequence[int]] = {KV: held[KV][start // self.pools.page_size : self.pools.pages_for(stop)]}
        return found | ({MAMBA: held[MAMBA]} if stop == self.tokens else {})

    def push_layer(self, sending: statelink.Sending, held: Any, span: tuple[int, int], layer: int) -> None:
        """Push a layer of a chunk, whose state is in the pools."""
        from statelink_demo.pools import KV, MAMBA

        name = KV if layer in self.pools.k else MAMBA
        items = self.items(held, span)
        if name in items:
            sending.push({name: items[name]}, span=span, layers=(layer, layer + 1), last=False)


def side(role: str, tokens: int) -> Process[Side]:
    """A process in the namespace of a role."""
    inside = ["ip", "netns", "exec", SPACES[role][0]]
    return Process(partial(Side, role, tokens), name=role, patience=150.0, through=inside)


def measure(rates: Sequence[int], tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Every rate, in megabits a second."""
    with namespaces(), side("prefill", tokens) as prefill, side("decode", tokens) as decode:
        address, room = prefill(Side.address), 0
        for rate in rates:
            shape = ["tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "2s"]
            run("ip", "netns", "exec", SPACES["prefill"][0], "tc", "qdisc", "replace", "dev", "veth0", "root", *shape)
            took: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 2):
                for way in WAYS if number % 2 else reversed(WAYS):
                    room += 1
                    decode.start(Side.receive, room, address)
                    prefill.start(Side.serve, room, way)
                    arrived, computed = decode.result(), prefill.result()
                    if number > 1:
                        took[way].append(arrived - computed)
            medians = {f"{way}_ms": round(statistics.median(values) * 1e3, 1) for way, values in took.items()}
            yield {"overlap": "after the forward pass", "mbit": rate, "tokens": tokens, **medians}


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[20, 50, 100, 1000])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    rows = []
    for row in measure(arguments.mbit, arguments.tokens, arguments.rounds):
        show(row)
        rows.append(row)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "overlap.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    # What is sent to a process names its module, which is `__main__` there, too.
    from benchmarks import overlap

    overlap.main()
