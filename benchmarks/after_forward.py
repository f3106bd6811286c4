"""What is left of a transfer when prefill's forward pass has ended, in turn with an engine's own connectors.

Two engines are in network namespaces, as on two hosts, with a line of so many megabits in a second between them (0: no
limit). All prompts of a turn are one step, if the engine gets them in time. What is timed goes from the end of that
forward pass until decode's engine knows that the state of every prompt is here: over each backend of Statelink

    layers       layers leave while the forward pass runs
    at the end   no layer does, so that everything leaves when the forward pass has ended

and over the engine's own connectors. ``at least`` is the time that the state takes on the line, less that of the
forward pass: nothing can be faster. The last columns are the time of prefill's forward pass without layers, and the
ratio of the time with layers to it, from pairs that were taken in turn.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .namespaces import SPACES, run
from .pairs import in_turn, ratio
from .rows import drawn

if TYPE_CHECKING:
    import argparse

__all__ = ["Prompts", "Turn", "Way", "add_arguments", "most_tokens", "report", "table"]

Row = dict[str, Any]
Prompts = Sequence[Sequence[int]]


class Turn(NamedTuple):
    """What a pair of engines said of one step.

    Attributes:
        left: Seconds from the end of prefill's last forward pass until decode had the state of all prompts.
        forward: Seconds of prefill's forward passes.
        tokens: Decode's tokens for each prompt.
    """

    left: float
    forward: float
    tokens: list[list[int]]


Way = Callable[[Prompts], Turn]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement, and the number of rounds of any."""
    parser.add_argument("--after-forward", action="store_true", help="what is left after a forward pass; needs root")
    parser.add_argument("--rounds", type=int, help="pairs of each ratio: 15, or 5 of what takes long")
    parser.add_argument("--mbit", nargs="+", type=int, default=[400, 1000, 0], help="lines of --after-forward")
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=_shape,
        default=[(1, 1000), (1, 3000), (64, 48)],
        metavar="COUNTxTOKENS",
        help="steps of --after-forward: 1x1000 1x3000 64x48",
    )


def _shape(text: str) -> tuple[int, int]:
    count, _, tokens = text.partition("x")
    return int(count), int(tokens)


def most_tokens(arguments: argparse.Namespace) -> int:
    """Tokens of the largest step."""
    most: int = max(count * tokens for count, tokens in arguments.prompts)
    return most


def report(engine: str, arguments: argparse.Namespace, ways: Mapping[str, Way], nbytes: int, words: int) -> None:
    """Measure, print, and write ``ENGINE-after-forward.json`` and ``.md``.

    Args:
        engine: For the names of files.
        arguments: See `add_arguments`. They also have ``rounds`` and ``out``.
        ways: By names: first Statelink with layers and at the end, over the same backend, and then any others.
        nbytes: Bytes of a token's state.
        words: Token ids are below this.
    """
    found = []
    for row in _measured(arguments, ways, nbytes, words):
        print(json.dumps(row), flush=True)
        found.append(row)
        # After each row, so that an interrupted run leaves what it has.
        for kind, text in (("json", json.dumps({"rounds": arguments.rounds, "rows": found})), ("md", table(found))):
            (arguments.out / f"{engine}-after-forward.{kind}").write_text(text)
    print(f"\n{table(found)}")


def _measured(arguments: argparse.Namespace, ways: Mapping[str, Way], nbytes: int, words: int) -> Iterator[Row]:
    seeds = itertools.count()

    def draw(count: int, tokens: int) -> list[list[int]]:
        return [random.Random(next(seeds)).choices(range(4, words), k=tokens) for _ in range(count)]

    def fresh(way: Way, *shape: int) -> Turn:
        return way(draw(*shape))  # prefill must compute it, so nobody gets a prompt again

    for (count, tokens), mbit in itertools.product(arguments.prompts, arguments.mbit):
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "2s"] if mbit else ["pfifo"]
        run("ip", "netns", "exec", SPACES["prefill"][0], "tc", "qdisc", "replace", "dev", "veth0", "root", *shape)
        same = draw(count, tokens)
        said = [way(same).tokens for way in ways.values()]
        if any(each != said[0] for each in said):
            raise AssertionError(f"the tokens of {count} prompts of {tokens} are not the same: {said}")
        turns = {name: partial(fresh, way, count, tokens) for name, way in ways.items()}
        took = list(in_turn(turns, arguments.rounds, 0))
        left = {name: statistics.median(turn[name].left for turn in took) for name in ways}
        line = count * tokens * nbytes * 8 / (mbit * 1e6) if mbit else 0.0
        both = [[turn[name].forward for turn in took] for name in list(ways)[:2]]
        yield {
            "prompts": count,
            "tokens": tokens,
            "MiB": round(count * tokens * nbytes / (1 << 20)),
            "mbit": mbit,
            "left_ms": {name: round(seconds * 1e3, 1) for name, seconds in left.items()},
            "least_ms": round(max(0.0, line - statistics.median(both[1])) * 1e3, 1),
            "forward_ms": round(statistics.median(both[1]) * 1e3),
            "forward": str(ratio(*both)),
        }


def table(rows: Sequence[Row]) -> str:
    """Rows as a table of markdown."""
    names = list(rows[0]["left_ms"])
    body = []
    for row in rows:
        one = f"{row['tokens']:,} tokens" if row["prompts"] == 1 else f"{row['prompts']} of {row['tokens']:,} tokens"
        rate = f"{row['mbit']:,} Mbit/s" if row["mbit"] else "no limit"
        left = (f"{row['left_ms'][name]:,.0f} ms" for name in names)
        forward = f"{row['forward_ms']:,} ms", row["forward"]
        body.append([one, f"{row['MiB']} MiB", rate, *left, f"{row['least_ms']:,.0f} ms", *forward])
    return drawn(["prompts", "state", "network", *names, "at least", "forward pass", "with layers"], body)
