"""SGLang's own connectors and Statelink's in turn, over the same pools and through the same calls.

    python -m benchmarks.sglang [--suite handoff rooms loop] [--against nixl:nixl mooncake:mooncake nixl:tcp]
                                [--workload A A-window B C] [--options JSON] [--rounds 15] [--out build/bench]
                                [--switch-interval 0.001] [--their-switch-interval 0.001]

``nixl:tcp`` stands for SGLang's NIXL connector in turn with Statelink over the backend ``tcp``. Both ends of each have
processes of their own; those whose turn it is not stand still. ``handoff`` times one request after the other (A, B, C),
and ``rooms`` small requests (E), of which 1, 16 and 64 are in flight. ``loop`` gives both sides a scheduler's loop,
2 ms of Python and 1 ms without the interpreter, and asks for its time: that spent in the connector's calls, and that by
which the rest of the loop takes longer than beside an idle connector.

A ratio is Statelink's time over SGLang's: the median of pairs that were taken in turn, with the bounds of 95 of 100
resamples. ``noise`` is the ratio of Statelink to itself. Every byte is compared before anything is timed. Nothing is
asserted on time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.models import make_llama

from benchmarks.pairs import in_turn, ratio

from .pair import BEGIN, Pair
from .workloads import WORKLOADS

if TYPE_CHECKING:
    from .sides import Played

Row = dict[str, Any]
IN_FLIGHT = (1, 16, 64)
WORK_SECONDS = 0.002
WARM = 2


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


def loop(ours: Pair, theirs: Pair, in_flight: int, rounds: int, count: int = 128) -> Row:
    """What a scheduler's loop loses to requests."""
    count = count if in_flight > 1 else count // 8
    work: dict[str, tuple[int, int]] = {}
    for pair in (ours, theirs):
        pair.go_on()
        prefill, decode = pair.both("iterations", WORK_SECONDS)
        work[pair.name] = prefill, decode
        pair.rest()
    seen: dict[str, list[dict[str, float]]] = {ours.name: [], theirs.name: []}

    def turn(pair: Pair) -> None:
        pair.go_on()
        quiet = []
        at = time.monotonic() + BEGIN
        for side, iterations in zip(pair.sides, work[pair.name], strict=True):
            side.ask("run", "benchmarks.sglang.sides", "quiet", at, iterations, 100)
        quiet = [side.answer() for side in pair.sides]
        played = pair.play("E", count, in_flight, work[pair.name])
        pair.rest()
        found: dict[str, float] = {}
        for role, idle, side in zip(("prefill", "decode"), quiet, played, strict=True):
            found |= {f"{role}_{what}": value for what, value in _per_request(side, idle, count).items()}
        seen[pair.name].append(found)

    for number in range(rounds + WARM):
        for pair in (ours, theirs) if number % 2 else (theirs, ours):
            turn(pair)
    row: Row = {"in_flight": in_flight, "sglang": theirs.name, "statelink": ours.name}
    for what in seen[ours.name][0]:
        mine, other = ([each[what] for each in seen[name][WARM:]] for name in (ours.name, theirs.name))
        row[what] = [round(statistics.median(each) * 1e6) for each in (mine, other)]
    for role in ("prefill", "decode"):
        totals = [
            [each[f"{role}_calls"] + max(each[f"{role}_lost"], 0.0) for each in seen[name][WARM:]] for name in seen
        ]
        row[f"{role}_ratio"] = str(ratio(*totals))
    return row


def _per_request(side: Played, idle: float, count: int) -> dict[str, float]:
    lost = side.work - side.loops * idle
    return {"calls": side.calls / count, "calls_cpu": side.calls_cpu / count, "lost": lost / count}


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
    return round(statistics.median(took) * 1e3, 3)


def measured(arguments: argparse.Namespace, model: Path) -> Iterator[tuple[str, Row]]:
    """Every row that was asked for."""
    rounds, suites = arguments.rounds, arguments.suite
    for against in arguments.against:
        connector, _, backend = against.partition(":")

        @contextlib.contextmanager
        def pairs(connector: str = connector, backend: str = backend) -> Iterator[list[Pair]]:
            """Processes of their own for each workload: no pools of another, and no threads that served it."""
            folder = arguments.out
            made = [
                Pair("statelink", backend, model, folder, arguments.options, arguments.switch_interval),
                Pair(connector, "", model, folder, interval=arguments.their_switch_interval),
            ]
            try:
                for pair in made:
                    pair.ready()
                yield made
            finally:
                for pair in made:
                    pair.close()

        for name in arguments.workload if "handoff" in suites else ():
            with pairs() as (ours, theirs):
                yield "handoff", handoff(ours, theirs, name, rounds)
        if {"rooms", "loop"} & set(suites):
            with pairs() as (ours, theirs):
                _prepare([ours, theirs], "E", max(IN_FLIGHT))
                for suite, measure in (("rooms", rooms), ("loop", loop)):
                    for in_flight in IN_FLIGHT if suite in suites else ():
                        yield suite, measure(ours, theirs, in_flight, rounds)
                _check([ours, theirs], "E")


def table(suite: str, rows: Sequence[Row]) -> str:
    """Rows as markdown."""
    names = list(rows[0])
    lines = [f"### {suite}", "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--suite", nargs="+", choices=["handoff", "rooms", "loop"], default=["handoff", "rooms", "loop"]
    )
    parser.add_argument("--against", nargs="+", default=["nixl:nixl", "mooncake:mooncake"])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["A", "A-window", "B", "C"])
    parser.add_argument("--options", type=json.loads, default={}, help="of Statelink's backend, as JSON")
    parser.add_argument("--switch-interval", type=float, help="of Statelink's processes, in seconds")
    parser.add_argument("--their-switch-interval", type=float, help="of the other connector's processes")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of each ratio")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_llama(Path(folder) / "llama")
        for suite, row in measured(arguments, model):
            print(suite, json.dumps(row), flush=True)
            found.setdefault(suite, []).append(row)
            # After each row, so that an interrupted run leaves what it has.
            (arguments.out / "sglang.json").write_text(
                json.dumps({"rounds": arguments.rounds, **found}, indent=1) + "\n"
            )
    text = "\n\n".join(table(suite, rows) for suite, rows in found.items())
    (arguments.out / "sglang.md").write_text(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
