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
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import statelink

from .namespaces import SPACES, namespaces, run
from .rows import show

WAYS = ("at the end", "chunks", "layers")


def tell(to: IO[str], **what: Any) -> None:
    """Write one line."""
    to.write(json.dumps(what) + "\n")
    to.flush()


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


class Prefill:
    """Computes prompts, and pushes them in one of the ways."""

    def __init__(self, model: Any, pools: Any, link: statelink.Link, tokens: int) -> None:
        self.model, self.pools, self.link, self.tokens = model, pools, link, tokens
        self.prompt = random.Random(1).choices(range(model.config.vocab_size), k=tokens)

    def serve(self, room: int, way: str) -> float:
        """Serve one request; when its forward pass ended."""
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


def prefill(tokens: int) -> None:
    """Serve a prompt for each line that comes."""
    model, pools, link = pools_of("prefill", tokens)
    with link:
        serving = Prefill(model, pools, link, tokens)
        tell(sys.stdout, address=link.address)
        for line in sys.stdin:
            asked = json.loads(line)
            tell(sys.stdout, computed=serving.serve(asked["room"], asked["way"]))


def decode(tokens: int) -> None:
    """Receive a request for each line that comes."""
    _, pools, link = pools_of("decode", tokens)
    with link:
        tell(sys.stdout, address=link.address)
        for line in sys.stdin:
            asked = json.loads(line)
            held = pools.allocate(tokens)
            receiving = link.receive(asked["room"], asked["peer"], tokens, held)
            receiving.wait(120)
            arrived = time.monotonic()
            receiving.check()
            pools.release(held)
            tell(sys.stdout, arrived=arrived)


class Side:
    """A process in a namespace, which answers lines with lines."""

    def __init__(self, role: str, tokens: int) -> None:
        command = ["ip", "netns", "exec", SPACES[role][0], sys.executable, "-m", "benchmarks.overlap"]
        self.process = subprocess.Popen(
            [*command, "--role", role, "--tokens", str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> None:
        assert self.process.stdin is not None
        tell(self.process.stdin, **what)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def measure(rates: Sequence[int], tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Every rate, in megabits a second."""
    with namespaces():
        sides = {role: Side(role, tokens) for role in SPACES}
        addresses = {role: side.answer()["address"] for role, side in sides.items()}
        room = 0
        for rate in rates:
            shape = ["tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", "2s"]
            run("ip", "netns", "exec", SPACES["prefill"][0], "tc", "qdisc", "replace", "dev", "veth0", "root", *shape)
            took: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 2):
                for way in WAYS if number % 2 else reversed(WAYS):
                    room += 1
                    sides["decode"].ask(room=room, peer=addresses["prefill"])
                    sides["prefill"].ask(room=room, way=way)
                    arrived, computed = sides["decode"].answer()["arrived"], sides["prefill"].answer()["computed"]
                    if number > 1:
                        took[way].append(arrived - computed)
            medians = {f"{way}_ms": round(statistics.median(values) * 1e3, 1) for way, values in took.items()}
            yield {"overlap": "after the forward pass", "mbit": rate, "tokens": tokens, **medians}
        for side in sides.values():
            side.end()


def main() -> None:
    """Parse arguments, measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[20, 50, 100, 1000])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--role", choices=SPACES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        {"prefill": prefill, "decode": decode}[arguments.role](arguments.tokens)
        return
    rows = []
    for row in measure(arguments.mbit, arguments.tokens, arguments.rounds):
        show(row)
        rows.append(row)
    from .plots import draw

    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "overlap.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    for path in draw(rows, arguments.out):
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
