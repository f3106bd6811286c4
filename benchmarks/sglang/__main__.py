"""SGLang's own connectors and Statelink's in turn, over the same pools and through the same calls.

    python -m benchmarks.sglang [--suite handoff rooms mixed loop] [--workload A A-window B C]
                                [--against nixl:nixl mooncake:mooncake nixl:tcp] [--options JSON] [--rounds 15]
                                [--switch-interval 0.001] [--their-switch-interval 0.001] [--out build/bench]
    python -m benchmarks.sglang --after-forward [--prompts 1x1000 1x3000 64x48] [--mbit 400 1000 0] ...

``nixl:tcp`` stands for SGLang's NIXL connector in turn with Statelink over the backend ``tcp``. Both ends of each have
processes of their own; those whose turn it is not stand still. ``handoff`` times one request after the other (A, B, C),
and ``rooms`` small requests (E), of which 1, 16 and 64 are in flight. ``mixed`` times requests of 1 MiB, one after the
other, alone and beside two of 512 MiB and eight of 64 MiB that are always under way.

``loop`` gives both sides a scheduler's loop. Each turn has the connector's calls, 2 ms of Python, and 1 ms without the
interpreter. What the loop loses to a request is its time beyond that of as many turns in processes without a connector
(``lost``), or beside the same connector without a request (``added``). A connector with a thread that never rests slows
the loop without any request: ``turn`` and ``idle_turn`` show that.

With ``--after-forward``, real servers are measured: see `benchmarks.after_forward`.

A ratio is Statelink's time over SGLang's: the median of pairs that were taken in turn, with the bounds of 95 of 100
resamples. ``noise`` is the ratio of Statelink to itself. Every byte is compared before anything is timed. Nothing is
asserted on time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from support.models import make_llama

from benchmarks import after_forward
from benchmarks.pairs import in_turn, ratio
from benchmarks.rows import drawn

from . import apart
from .pair import Pair
from .sides import iterations
from .workloads import WORKLOADS

Row = dict[str, Any]
IN_FLIGHT = (1, 16, 64)
ROLES = ("prefill", "decode")
WORK_SECONDS = 0.002
WARM = 2
MIXES = {"2x512": 2, "8x64": 8}
"""Large requests at once in each workload that has a small one, too."""
MIB = 4096
"""What the large requests of a round move together."""
SMALL = 60
"""Small requests of a round, alone and beside large ones. Those beside that begin after the large ones do not count."""


def handoff(ours: Pair, theirs: Pair, name: str, rounds: int) -> Row:
    """One request after the other."""
    _prepare([ours, theirs], name, 1)
    count = 8 if name.startswith("A") else 1

    def way(pair: Pair) -> Callable[[], float]:
        def turn() -> float:
            pair.go_on()
            took = [pair.play(name, 1, 1)[1].each[0] for _ in range(count)]
            pair.rest()
            return statistics.median(took)

        return turn

    found = list(in_turn({"ours": way(ours), "again": way(ours), "theirs": way(theirs)}, rounds, WARM))
    _check([ours, theirs], name)
    return _row(ours, theirs, name, {each: [row[each] for row in found] for each in found[0]}, in_flight=1)


def rooms(ours: Pair, theirs: Pair, in_flight: int, rounds: int, count: int = 200) -> Row:
    """Small requests, many in flight."""
    count = count if in_flight > 1 else count // 4
    cpu: dict[str, list[float]] = {"ours": [], "theirs": []}

    def way(pair: Pair) -> Callable[[], float]:
        def turn() -> float:
            pair.go_on()
            sides = pair.play("E", count, in_flight)
            pair.rest()
            cpu["ours" if pair is ours else "theirs"].append(sum(side.cpu for side in sides) / count)
            return max(side.seconds for side in sides) / count

        return turn

    found = list(in_turn({"ours": way(ours), "again": way(ours), "theirs": way(theirs)}, rounds, WARM))
    row = _row(ours, theirs, "E", {each: [row[each] for row in found] for each in found[0]}, in_flight=in_flight)
    return row | {f"cpu_ms_{who}": _ms(each) for who, each in cpu.items()}


def mixed(ours: Pair, theirs: Pair, name: str, rounds: int, warm: int = WARM) -> Row:
    """A small request alone, and beside large ones that are always under way."""
    large = [MIB // MIXES[name] // WORKLOADS[name].pages] * MIXES[name]
    none = [0] * len(large)
    for pair in (ours, theirs):
        pair.prepare(name, len(large))
        pair.go_on()
        pair.mix(name, [1] * len(large) + [1])
        pair.rest()
    _check([ours, theirs], name)
    seen: dict[str, list[dict[str, list[float]]]] = {ours.name: [], theirs.name: []}

    def turn(pair: Pair) -> None:
        pair.go_on()
        *_, alone = pair.mix(name, [*none, SMALL])
        *others, small = pair.mix(name, [*large, SMALL])
        pair.rest()
        until = min(each[-1][1] for each in others)
        beside = [each for each in small if each[0] < until]
        parts = {"alone": alone, "beside": beside, "large": [*itertools.chain(*others)]}
        seen[pair.name].append({part: [end - began for began, end in times] for part, times in parts.items()})

    for number in range(rounds + warm):
        for pair in (ours, theirs) if number % 2 else (theirs, ours):
            turn(pair)
    _check([ours, theirs], name)
    row: Row = {"workload": name, "sglang": theirs.name, "statelink": ours.name}
    for part in ("beside", "alone", "large"):
        both = [[each[part] for each in seen[pair.name][warm:]] for pair in (ours, theirs)]
        row["ratio" if part == "beside" else f"{part}_ratio"] = str(
            ratio(*([statistics.median(times) for times in turns] for turns in both))
        )
        row[f"{part}_times"] = [sum(map(len, turns)) for turns in both]
        for which, quantile in (("", 0.5), ("_p99", 0.99)):
            row[f"{part}{which}_ms"] = [_quantile([*itertools.chain(*turns)], quantile) for turns in both]
    return row


def loop(bare: Pair, ours: Pair, theirs: Pair, in_flight: int, rounds: int, count: int = 128) -> Row:
    """What a scheduler's loop loses to requests, as its time beyond that of as many turns without them."""
    count = count if in_flight > 1 else count // 8
    bare.go_on()
    work = bare.both(iterations, WORK_SECONDS)
    bare.rest()
    seen: dict[str, list[dict[str, float]]] = {ours.name: [], theirs.name: []}

    def idle(pair: Pair) -> list[float]:
        pair.go_on()
        turns = pair.idle(work)
        pair.rest()
        return turns

    def turn(pair: Pair) -> None:
        turns = idle(bare), idle(pair)
        pair.go_on()
        played = pair.play("E", count, in_flight, work)
        pair.rest()
        found = {"request": statistics.median(played[1].each)}
        for role, alone, waiting, side in zip(ROLES, *turns, played, strict=True):
            found |= {f"{role}_turn": alone, f"{role}_idle_turn": waiting, f"{role}_calls": side.calls / count}
            for what, expected in (("lost", alone), ("added", waiting)):
                # Each turn holds the calls. Beyond them, a loss below zero is noise.
                found[f"{role}_{what}"] = max(side.calls, side.seconds - side.turns * expected) / count
        seen[pair.name].append(found)

    for number in range(rounds + WARM):
        for pair in (ours, theirs) if number % 2 else (theirs, ours):
            turn(pair)
    row: Row = {"in_flight": in_flight, "sglang": theirs.name, "statelink": ours.name}
    for what in seen[ours.name][0]:
        both = [[each[what] for each in seen[name][WARM:]] for name in (ours.name, theirs.name)]
        row[f"{what}_us"] = [round(statistics.median(each) * 1e6) for each in both]
        if what.endswith(("_lost", "_added")):
            row[f"{what}_ratio"] = str(ratio(*both))
    return row


def _prepare(pairs: Sequence[Pair], name: str, in_flight: int) -> None:
    for pair in pairs:
        pair.prepare(name, in_flight)
        pair.go_on()
        pair.play(name, max(2, in_flight), in_flight)
        pair.rest()
    _check(pairs, name)


def _check(pairs: Sequence[Pair], name: str) -> None:
    for pair in pairs:
        pair.check(name)


def _row(ours: Pair, theirs: Pair, name: str, took: dict[str, list[float]], **more: Any) -> Row:
    return {
        "workload": name,
        "sglang": theirs.name,
        "statelink": ours.name,
        **more,
        "ratio": str(ratio(took["ours"], took["theirs"])),
        "noise": str(ratio(took["ours"], took["again"])),
        "ms_ours": _ms(took["ours"]),
        "ms_theirs": _ms(took["theirs"]),
    }


def _ms(took: Sequence[float]) -> float:
    return _quantile(took, 0.5)


def _quantile(took: Sequence[float], which: float) -> float:
    """In milliseconds."""
    return round(float(np.quantile(took, which)) * 1e3, 3)


def _pairs(against: str, arguments: argparse.Namespace, model: Path) -> contextlib.AbstractContextManager[list[Pair]]:
    """Processes of their own for each workload: no pools of another, and no threads that served it."""
    connector, _, backend = against.partition(":")
    options, interval = arguments.options, arguments.switch_interval
    return _ready(
        [
            Pair("statelink", backend, model, options, interval),
            Pair(connector, "", model, interval=arguments.their_switch_interval),
        ]
    )


@contextlib.contextmanager
def _ready(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Pairs that are ready, and closed in the end."""
    try:
        for pair in pairs:
            pair.ready()
        yield pairs
    finally:
        for pair in pairs:
            pair.close()


def measured(arguments: argparse.Namespace, model: Path) -> Iterator[tuple[str, Row]]:
    """Every row that was asked for."""
    rounds, suites = arguments.rounds, arguments.suite
    for against in arguments.against:
        made = partial(_pairs, against, arguments, model)
        for name in arguments.workload if "handoff" in suites else ():
            with made() as [ours, theirs]:
                yield "handoff", handoff(ours, theirs, name, rounds)
        for name in MIXES if "mixed" in suites else ():
            with made() as [ours, theirs]:
                yield "mixed", mixed(ours, theirs, name, rounds)
        if {"rooms", "loop"} & set(suites):
            with made() as [ours, theirs]:
                _prepare([ours, theirs], "E", max(IN_FLIGHT))
                for in_flight in IN_FLIGHT if "rooms" in suites else ():
                    yield "rooms", rooms(ours, theirs, in_flight, rounds)
                if "loop" in suites:
                    with _ready([Pair("", "", model)]) as [bare]:
                        for in_flight in IN_FLIGHT:
                            yield "loop", loop(bare, ours, theirs, in_flight, rounds)
                _check([ours, theirs], "E")


def table(suite: str, rows: Sequence[Row]) -> str:
    """Rows as markdown."""
    return f"### {suite}\n\n{drawn(list(rows[0]), ([*map(_cell, row.values())] for row in rows))}"


def _cell(value: Any) -> str:
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = ["handoff", "rooms", "mixed", "loop"]
    parser.add_argument("--suite", nargs="+", choices=suites, default=suites)
    parser.add_argument(
        "--against", nargs="+", help="nixl:nixl and mooncake:mooncake, or mooncake:nixl with --after-forward"
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=[each for each in WORKLOADS if each not in MIXES],
        default=["A", "A-window", "B", "C"],
    )
    parser.add_argument("--options", type=json.loads, default={}, help="of Statelink's backend, as JSON")
    parser.add_argument("--switch-interval", type=float, help="of Statelink's processes, in seconds")
    parser.add_argument("--their-switch-interval", type=float, help="of the other connector's processes")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    after_forward.add_arguments(parser)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (5 if arguments.after_forward else 15)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.after_forward:
            arguments.against = arguments.against or ["nixl:nixl", "mooncake:nixl"]
            apart.report(arguments, Path(folder))
            return
        arguments.against = arguments.against or ["nixl:nixl", "mooncake:mooncake"]
        model = make_llama(Path(folder) / "llama")
        for suite, row in measured(arguments, model):
            print(suite, json.dumps(row), flush=True)
            found.setdefault(suite, []).append(row)
            # After each row, so that an interrupted run leaves what it has.
            (arguments.out / "sglang.json").write_text(
                json.dumps({"rounds": arguments.rounds, **found}, indent=1) + "\n"
            )
    text = "\n".join(table(suite, rows) for suite, rows in found.items())
    (arguments.out / "sglang.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
