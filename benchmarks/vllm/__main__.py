"""vLLM's own NIXL connectors and Statelink's in turn, each between two real engines on the CPU.

    python -m benchmarks.vllm [--backend nixl tcp] [--against NixlConnector NixlPushConnector]
                              [--length 100 1000 4000] [--rounds 15] [--switch-interval 0.001] [--out build/bench]
    python -m benchmarks.vllm --after-forward [--prompts 1x1000 1x3000 64x48] [--mbit 400 1000 0] ...
    python -m benchmarks.vllm --moves [--backend nixl tcp] [--length 1000 4000] [--rounds 15]
    python -m benchmarks.vllm --conversations [--turns 1500x500x100 2000x50x100] [--models attention hybrid] ...

What is timed is decode's part of a request, as vLLM's scheduler sees it: from the moment when decode gets the request
with prefill's answer until vLLM knows that the state is here. Prefill computes each prompt once, and keeps it. Decode
keeps nothing. Each engine has a process of its own; those whose turn it is not stand still.

vLLM has two connectors for NIXL. With ``NixlConnector``, decode reads from prefill's memory. With
``NixlPushConnector``, decode tells prefill its blocks, and prefill writes, as with Statelink.

``computed`` is with prompts that prefill has to compute, 512 tokens in a step, from prefill's answer or as above. With
Statelink and a router that gives both engines the request at once, most of such a prompt has moved by then.

``at_once`` is Statelink behind a router that gives both engines the request at the same time; the others are behind a
serial one. The time begins when prefill gives its answer, because decode has the request before that. So the way of the
answer through the router is in neither time.

With ``--after-forward``, see `benchmarks.after_forward`: over Statelink, a router asks both at once. With
``--conversations``, see `benchmarks.vllm.conversations`.

With ``--moves``, see `benchmarks.vllm.moves`: the pause of a stream that moves to another server.

A ratio is Statelink's time over that of vLLM's connector: the median of pairs that were taken in turn, with the bounds
of 95 of 100 resamples. ``noise`` is the ratio of Statelink to itself. The tokens of both are compared with those of one
engine. Nothing is asserted on time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_processes import free_port, running
from support.engines import PREFILL, Ended, Pair, prompt_of
from support.models import VOCABULARY, make_wide

from benchmarks import after_forward
from benchmarks.after_forward import Prompts, Turn, most_tokens
from benchmarks.namespaces import SPACES, namespaces
from benchmarks.pairs import in_turn, ratio
from benchmarks.rows import table
from benchmarks.vllm import conversations

from . import moves

Row = dict[str, Any]
WARM = 2
BLOCK = 32
TOKEN = 8 * 8 * 2 * 64 * 4
"""Bytes of a token's state in the model: layers, KV heads, key and value, numbers of a head, bytes of each."""
PREFILL_NAME = "prefill-0"
OWN_CONNECTORS = ("NixlConnector", "NixlPushConnector")


class Way:
    """A prefill and a decode engine with one connector.

    Args:
        moves: Statelink's backend, or one of vLLM's own connectors.
        model: The folder of a model.
        folder: For logs.
        most: Tokens of the longest prompt; if the engines are apart, of the largest step.
        interval: Statelink's option `switch_interval`, if one is given.
        apart: Whether the engines are in namespaces of their own, and a step has room for a whole prompt.
    """

    def __init__(
        self, moves: str, model: Path, folder: Path, most: int, interval: float | None = None, *, apart: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prefill: dict[str, Any]
        decode: dict[str, Any]
        if moves in OWN_CONNECTORS:
            config, prefill = {}, {"kv_connector": moves, "kv_connector_module_path": None}
            decode = prefill
        else:
            listen = f"tcp://{SPACES['prefill'][1] if apart else '127.0.0.1'}:{free_port()}"
            # Whoever stands still is not lost.
            config = {"backend": moves, "liveness": 600.0, "deadline": 600.0}
            if interval is not None:
                config["switch_interval"] = interval
            prefill = {"engine_id": PREFILL_NAME, "more": {"listen": listen}}
            decode = {"more": {"peers": {PREFILL_NAME: [listen]}}}
            if apart:
                config |= {"insecure": True, "options": {"same_host_copy": False} if moves == "tcp" else {}}
                decode["more"]["listen"] = f"tcp://{SPACES['decode'][1]}:{free_port()}"
        self.pair = Pair(
            folder,
            model,
            config,
            prefill=prefill,
            decode=decode,
            policy="fail",
            own=({}, {"enable_prefix_caching": False}),
            runner=1,  # Triton's interpreter, which the second needs here, takes longer than a transfer
            max_model_len=most + 2 * BLOCK,
            ordinary=apart,
            spaces=SPACES if apart else {},
            max_num_seqs=64 if apart else 8,
            max_num_batched_tokens=most + 2 * BLOCK if apart else 512,
            # Blocks of short prompts are not full, and at most a quarter of prefill's may leave early.
            kv_cache_memory_bytes=(10 if apart else 3) * (most + 2 * BLOCK) * TOKEN,
        )
        self._numbers = itertools.count()
        self._seeds = itertools.count(1_000_000)

    def go_on(self) -> None:
        for engine in (self.pair.prefill, self.pair.decode):
            engine.go_on()

    def rest(self) -> None:
        for engine in (self.pair.prefill, self.pair.decode):
            engine.settle()
            engine.stop()

    def hand(self, prompt: Sequence[int]) -> Ended:
        """One request; what decode says of it."""
        return self.pair.hand(prompt, 2, f"timed{next(self._numbers)}")[1]

    def hand_at_once(self, *prompts: Sequence[int]) -> list[tuple[Ended, Ended]]:
        """Requests that a router gives both engines at the same time; what each says of them."""
        named = [(f"timed{next(self._numbers)}", each) for each in prompts]
        asks = {"do_remote_prefill": True, "remote_engine_id": PREFILL_NAME}
        self.pair.decode.add_all([(name, each, 2, {**asks, "transfer_id": name}) for name, each in named])
        self.pair.prefill.add_all([(name, each, 1, {**PREFILL, "transfer_id": name}) for name, each in named])
        return [(self.pair.prefill.result(name), self.pair.decode.result(name)) for name, _ in named]

    def hand_in_turn(self, prompts: Prompts) -> list[Ended]:
        """Requests that a serial router gives decode with prefill's answers; what decode says of them."""
        named = [(f"timed{next(self._numbers)}", each) for each in prompts]
        self.pair.prefill.add_all([(name, each, 1, dict(PREFILL)) for name, each in named])
        for name, each in named:
            self.pair.decode.add(name, each, 2, self.pair.prefill.result(name).params)
        return [self.pair.decode.result(name) for name, _ in named]

    def step(self, prompts: Prompts, *, at_once: bool, whole: bool = False) -> Turn:
        """One step, whose layers leave while it runs. With ``whole``, all of them leave at its end."""
        self.go_on()
        before = self.pair.prefill.ask()["forwards"]
        with self.pair.prefill.whole() if whole else contextlib.nullcontext():
            ended = [each for _, each in self.hand_at_once(*prompts)] if at_once else self.hand_in_turn(prompts)
        passes = [each for each in self.pair.prefill.ask()["forwards"] if each not in before]
        self.rest()
        left = max(map(self._loaded, ended)) - passes[-1][1]
        return Turn(left, sum(end - began for began, end in passes), [each.tokens for each in ended])

    def turn(self, prompt: Sequence[int]) -> float:
        """Seconds from decode's arrival of a request until its state was there."""
        self.go_on()
        second = self.hand(prompt)
        self.rest()
        began: float = second.began
        return self._loaded(second) - began

    def turn_computed(self, length: int, *, at_once: bool) -> float:
        """Seconds until the state of a request was there whose prompt nobody has seen: see this module."""
        prompt = prompt_of(next(self._seeds), length)
        return self.turn_at_once(prompt) if at_once else self.turn(prompt)

    def turn_at_once(self, prompt: Sequence[int]) -> float:
        """Seconds from prefill's answer until the state of a request was there."""
        self.go_on()
        ((first, second),) = self.hand_at_once(prompt)
        self.rest()
        ended: float = first.ended_at
        return self._loaded(second) - ended

    def _loaded(self, second: Ended) -> float:
        loaded: float | None = second.loaded
        if loaded is None or second.why != "length":
            raise AssertionError(f"state was not loaded: {second}\n{self.pair.decode.logged()[-6000:]}")
        return loaded


def measure(ours: Way, theirs: Way, length: int, rounds: int) -> Row:
    prompt = prompt_of(length, length)
    for way in (ours, theirs):
        way.go_on()
        alone = way.pair.alone(prompt, 2)
        handed = [way.hand(prompt)] + ([way.hand_at_once(prompt)[0][1]] if way is ours else [])
        if any(each.tokens != alone for each in handed):
            raise AssertionError(f"the tokens of {length} are not those of one engine")
        way.rest()

    def timed(turn: Callable[[Sequence[int]], float]) -> Callable[[], float]:
        return lambda: turn(prompt)

    ways = {
        "ours": timed(ours.turn),
        "again": timed(ours.turn),
        "theirs": timed(theirs.turn),
        "at_once": timed(ours.turn_at_once),
        "computed": lambda: ours.turn_computed(length, at_once=False),
        "computed_at_once": lambda: ours.turn_computed(length, at_once=True),
        "computed_theirs": lambda: theirs.turn_computed(length, at_once=False),
    }
    found = list(in_turn(ways, rounds, WARM))
    took = {name: [row[name] for row in found] for name in ways}
    return {
        "tokens": length,
        "MiB": round(-(-length // BLOCK) * BLOCK * TOKEN / (1 << 20), 1),
        "ratio": str(ratio(took["ours"], took["theirs"])),
        "at_once": str(ratio(took["at_once"], took["theirs"])),
        "noise": str(ratio(took["ours"], took["again"])),
        "ms_ours": _ms(took["ours"]),
        "ms_at_once": _ms(took["at_once"]),
        "ms_theirs": _ms(took["theirs"]),
        "ms_computed": _ms(took["computed"]),
        "ms_computed_at_once": _ms(took["computed_at_once"]),
        "ms_computed_theirs": _ms(took["computed_theirs"]),
    }


def _ms(took: Sequence[float]) -> float:
    return round(statistics.median(took) * 1e3, 2)


@contextlib.contextmanager
def ways(
    backend: str, against: str, model: Path, folder: Path, longest: int, interval: float | None
) -> Iterator[tuple[Way, Way]]:
    """Statelink's engines, and those of one of vLLM's connectors."""
    ours = Way(backend, model, folder / f"statelink-{backend}", longest, interval)
    with running(ours.pair):
        ours.rest()
        theirs = Way(against, model, folder / against, longest)
        with running(theirs.pair):
            theirs.rest()
            yield ours, theirs


def measured(arguments: argparse.Namespace, model: Path) -> Iterator[Row]:
    """Every row that was asked for."""
    logs = arguments.out / "vllm-logs"
    for backend, against in itertools.product(arguments.backend, arguments.against):
        given = backend, against, model, logs, max(arguments.length), arguments.switch_interval
        with ways(*given) as (ours, theirs):
            for length in arguments.length:
                yield {"statelink": backend, "vllm": against} | measure(ours, theirs, length, arguments.rounds)


def report_after_forward(arguments: argparse.Namespace, model: Path) -> None:
    """Measure Statelink over each backend, and vLLM's own connectors, behind the router that each has."""
    logs, most = arguments.out / "vllm-logs-apart", most_tokens(arguments)
    with namespaces(), contextlib.ExitStack() as stack:

        def way(moves: str) -> Way:
            made = Way(moves, model, logs / moves, most, arguments.switch_interval, apart=True)
            stack.enter_context(running(made.pair))
            made.rest()
            return made

        found: dict[str, after_forward.Way] = {}
        for backend in arguments.backend:
            step = functools.partial(way(backend).step, at_once=True)
            found |= {f"{backend}, layers": step, f"{backend}, at the end": functools.partial(step, whole=True)}
        found |= {name: functools.partial(way(name).step, at_once=False) for name in arguments.against}
        after_forward.report("vllm", arguments, found, TOKEN, VOCABULARY)


def write(arguments: argparse.Namespace, name: str, rows: Iterable[Row]) -> None:
    """Print rows, and write them into ``NAME.json`` and ``NAME.md``."""
    found: list[Row] = []
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
        # After each row, so that an interrupted run leaves what it has.
        said = {"rounds": arguments.rounds, "rows": found}
        (arguments.out / f"{name}.json").write_text(json.dumps(said, indent=1) + "\n")
    (arguments.out / f"{name}.md").write_text(table(found))
    print(f"\n{table(found)}")


def main() -> None:
    """Parse arguments, measure, print, write."""
    os.environ["STATELINK_UNPOISONED"] = "1"  # the tests fill each block, which takes time; see support/poison.py there
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["nixl"], help="Statelink's backends")
    parser.add_argument("--against", nargs="+", default=OWN_CONNECTORS, help="vLLM's connectors")
    parser.add_argument("--length", nargs="+", type=int, help="tokens of a prompt: 100 1000 4000, or 1000 4000")
    parser.add_argument("--switch-interval", type=float, help="Statelink's option, in seconds")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--moves", action="store_true", help="the pause of a stream that moves to another server")
    after_forward.add_arguments(parser)
    conversations.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 5 if arguments.after_forward or arguments.conversations else 15
    arguments.length = arguments.length or ([1000, 4000] if arguments.moves else [100, 1000, 4000])
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.moves:
            write(arguments, "vllm-moves", moves.report(arguments, Path(folder)))
            return
        if arguments.conversations:
            conversations.report(arguments, Path(folder))
            return
        model = make_wide(Path(folder) / "wide")
        if arguments.after_forward:
            report_after_forward(arguments, model)
        else:
            write(arguments, "vllm", measured(arguments, model))


if __name__ == "__main__":
    main()
