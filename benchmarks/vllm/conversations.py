"""Conversations: the time to the first token of the second turn, and of the third.

A conversation has a first prompt, and in each turn an answer, behind which the client adds some tokens. These are the
three numbers of ``1500x500x100``. What is timed goes from the moment when a router has a turn until decode's engine
gives the first token of its answer. There are two engines, both of which send and receive, and these ways:

    without         prefill computes what is not in its own prefix cache, the answer of the turn before included
    held            decode holds the state of a turn until the next one, and prefill receives it
    asked           the router asks decode for the history in each turn, which its prefix cache has
    NixlConnector   vLLM's own connector for NIXL with ``bidirectional_kv_xfer``, as its router passes it

Each way has conversations of its own, so that none finds what another one has left in a prefix cache. ``asked`` needs
prefix caches, and sends nothing of recurrent layers. vLLM's connector sends back full attention alone. A ratio is the
time of a way over that of ``without``: the median of conversations that were taken in turn, with the bounds of 95 of
100 resamples. ``computed`` is how many tokens prefill computed. Before anything is timed, the first tokens of each
answer are compared with those of one engine, in a conversation of each way.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from engine_processes import running
from support.engines import PREFILL, Ended, Pair, prompt_of
from support.models import make_hybrid, make_llama

from benchmarks.pairs import in_turn, ratio

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

__all__ = ["MODELS", "add_arguments", "report"]

Row = dict[str, Any]
MODELS: dict[str, Callable[[Path], Path]] = {
    "attention": partial(make_llama, max_position_embeddings=16384),
    "hybrid": partial(make_hybrid, max_position_embeddings=16384),
}
"""By what their layers are."""
OWN = "NixlConnector"
TURNS = 3
LAST = 8
"""Tokens of the last answer, and first tokens of each answer that are compared."""
CHUNK = 64
"""Tokens of the model's chunks of Mamba 2. With a prefix cache, vLLM's code for a CPU takes one chunk in a step."""
HOLD_SECONDS = 90.0
POOL_BYTES = 1 << 30


class Shape(NamedTuple):
    """Tokens of the first prompt, of each answer, and of what the client adds behind each."""

    prompt: int
    answer: int
    added: int

    @property
    def most(self) -> int:
        """Tokens of a whole conversation."""
        return self.prompt + (TURNS - 1) * (self.answer + self.added) + LAST


class Turn(NamedTuple):
    """A turn of a conversation.

    Attributes:
        tokens: Of its prompt.
        seconds: Until the first token of its answer.
        computed: How many of its tokens prefill computed.
    """

    tokens: int
    seconds: float
    computed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("--conversations", action="store_true", help="the first token of a second and a third turn")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models of --conversations")
    parser.add_argument(
        "--turns",
        nargs="+",
        type=_shape,
        default=[Shape(1500, 500, 100), Shape(2000, 50, 100)],
        metavar="PROMPTxANSWERxADDED",
        help="conversations: 1500x500x100 2000x50x100",
    )
    parser.add_argument(
        "--prefix-caches", nargs="+", choices=["yes", "no"], default=["yes", "no"], help="engines of --conversations"
    )


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split("x")))


class Servers:
    """A prefill and a decode engine with one connector, which both send and receive.

    Args:
        moves: Statelink's backend, or `OWN`.
        model: The folder of a model.
        folder: For logs.
        most: Tokens of the longest conversation.
        caches: Whether the engines have prefix caches.
        step: Most tokens of a step.
    """

    def __init__(self, moves: str, model: Path, folder: Path, most: int, *, caches: bool, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        side: dict[str, Any] = {"kv_role": "kv_both"}
        # Whoever stands still is not lost.
        config: dict[str, Any] = {"backend": moves, "liveness": 600.0, "deadline": 600.0}
        if moves == OWN:
            side |= {"kv_connector": moves, "kv_connector_module_path": None}
            config = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": HOLD_SECONDS}
        self.own = moves == OWN
        self.pair = Pair(
            folder,
            model,
            config,
            prefill=side,
            decode=side,
            runner=1,  # Triton's interpreter, which the second needs here, computes slowly
            max_model_len=most + 64,
            max_num_batched_tokens=step,
            enable_prefix_caching=caches,
            kv_cache_memory_bytes=POOL_BYTES,
        )
        self._names = (f"turn{number}" for number in itertools.count())

    def go_on(self) -> None:
        for engine in (self.pair.prefill, self.pair.decode):
            engine.go_on()

    def rest(self) -> None:
        for engine in (self.pair.prefill, self.pair.decode):
            if not self.own:  # which holds blocks for `HOLD_SECONDS` after the last turn
                engine.settle()
            engine.stop()

    def talk(self, way: str, shape: Shape, seed: int, *, compare: bool = False) -> list[Turn]:
        """A conversation; its turns but the first."""
        self.go_on()
        turns = list(self._turns(way, shape, seed, compare=compare))
        self.rest()
        return turns[1:]

    def _turns(self, way: str, shape: Shape, seed: int, *, compare: bool) -> Iterator[Turn]:
        history, back = prompt_of(seed, shape.prompt), None
        for number in range(TURNS):
            last = number + 1 == TURNS
            count = LAST if last else shape.answer
            began, first, second = self._turn(way, history, count, back, last=last)
            back = second.params
            if second.first is None or second.why != "length":
                raise AssertionError(f"a turn has not ended well: {second}\n{self.pair.decode.logged()[-6000:]}")
            if compare and second.tokens[:LAST] != self.pair.alone(history, LAST):
                raise AssertionError(f"the tokens of {way}, turn {number + 1}, are not those of one engine")
            yield Turn(len(history), second.first - began, len(history) - (first.cached or 0))
            history = [*history, *second.tokens, *prompt_of(seed + number + 1, shape.added)]

    def _turn(
        self, way: str, history: Sequence[int], count: int, back: Any, *, last: bool
    ) -> tuple[float, Ended, Ended]:
        """One turn: when it began, and what prefill and decode said of it."""
        prefill, decode, name = self.pair.prefill, self.pair.decode, next(self._names)
        asks, began = dict(PREFILL), None
        if back and way == "held":
            asks = {**back, "do_remote_prefill": True, "do_remote_decode": True}
        elif back and way == OWN:
            asks = back
        elif way == "asked":
            answer = decode.run(f"{name}asked", history, 1, {**PREFILL, "cached": True})
            began = answer.began
            if "refused" not in (answer.params or {}):
                asks = {**(answer.params or {}), "do_remote_decode": True}
        first = prefill.run(name, history, 1, asks)
        said = first.params or {}
        if way == "held" and not last:
            said = {**said, "do_remote_decode": True, "hold": HOLD_SECONDS}
        return began or first.began, first, decode.run(name, history, count, said)


def report(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure, print, and write ``vllm-conversations.json``. Rows of an earlier run that are not measured stay.

    It is written after each round, so that an interrupted run leaves what it has.
    """
    out = arguments.out / "vllm-conversations.json"
    rows: list[Row] = json.loads(out.read_text())["rows"] if out.exists() else []
    for row in _measured(arguments, folder):
        print(json.dumps(row), flush=True)
        known = [all(each[key] == row[key] for key in KEYS) for each in rows]
        rows = [each for each, same in zip(rows, known, strict=True) if not same] + [row]
        out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


KEYS = ("model", "caches", "statelink", "turns")
"""What a row is of."""


def _measured(arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    most = max(shape.most for shape in arguments.turns)
    for name, caches, backend in itertools.product(arguments.models, arguments.prefix_caches, arguments.backend):
        model = MODELS[name](folder / name)
        logs = arguments.out / "vllm-logs-conversations" / f"{name}-{caches}"
        with ExitStack() as stack:
            both, known = name == "attention", caches == "yes"
            step = 512 if both or not known else CHUNK
            made = {
                moves: Servers(moves, model, logs / moves, most, caches=known, step=step)
                for moves in (backend, *([OWN] if both else []))
            }
            for each in made.values():
                stack.enter_context(running(each.pair))
                each.rest()
            ours = ["without", "held", *(["asked"] if both and known else [])]
            ways = dict.fromkeys(ours, made.pop(backend)) | made
            for shape in arguments.turns:
                row = {"model": name, "caches": caches, "statelink": backend, "turns": list(shape)}
                for found in _compared(ways, shape, arguments.rounds):
                    yield row | found


def _compared(ways: dict[str, Servers], shape: Shape, rounds: int) -> Iterator[Row]:
    """What was found so far, after each round."""
    seeds = itertools.count(1, 10)
    for way, servers in ways.items():
        servers.talk(way, shape, 1_000_000 + next(seeds), compare=True)
    turns = {
        way: partial(lambda way, servers: servers.talk(way, shape, next(seeds)), way, servers)
        for way, servers in ways.items()
    }
    took: list[dict[str, list[Turn]]] = []
    for each in in_turn(turns, rounds, 0):
        took.append(each)
        found: Row = {}
        for way in ways:
            its, without = (zip(*(each[name] for each in took), strict=True) for name in (way, "without"))
            found[way] = list(map(_median, its, without))
        yield {"rounds": len(took), "ways": found}


def _median(turns: Sequence[Turn], without: Sequence[Turn]) -> Row:
    """The same turn of several conversations, each with one without."""
    took, beside = ([each.seconds for each in some] for some in (turns, without))
    return {
        "tokens": turns[0].tokens,
        "ms": round(statistics.median(took) * 1e3),
        "computed": round(statistics.median(each.computed for each in turns)),
        "ratio": str(ratio(took, beside)),
    }
