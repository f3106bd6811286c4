"""vLLM's own NIXL connector and Statelink's in turn, each between two real engines on the CPU.

    python -m benchmarks.vllm [--backend nixl tcp] [--length 100 1000 4000] [--rounds 15] [--out build/bench]

What is timed is decode's part of a request, as vLLM's scheduler sees it: from the moment when decode gets the request
with prefill's answer until vLLM knows that the state is here. Prefill computes each prompt once, and keeps it. Decode
keeps nothing. Each engine has a process of its own; those whose turn it is not stand still.

A ratio is Statelink's time over NIXL's: the median of pairs that were taken in turn, with the bounds of 95 of 100
resamples. ``noise`` is the ratio of Statelink to itself. The tokens of both are compared with those of one engine.
Nothing is asserted on time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_processes import running
from support.engines import Ended, Pair, prompt_of
from support.models import make_wide

from benchmarks.pairs import in_turn, ratio

Row = dict[str, Any]
WARM = 2
BLOCK = 32
TOKEN = 8 * 8 * 2 * 64 * 4
"""Bytes of a token's state in the model: layers, KV heads, key and value, numbers of a head, bytes of each."""
OWN_CONNECTOR = {"kv_connector": "NixlConnector", "kv_connector_module_path": None}


class Way:
    """A prefill and a decode engine with one connector.

    Args:
        backend: Statelink's, or an empty text for vLLM's own NIXL connector.
        model: The folder of a model.
        folder: For logs.
        longest: Tokens of the longest prompt.
    """

    def __init__(self, backend: str, model: Path, folder: Path, longest: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        side = {} if backend else dict(OWN_CONNECTOR)
        self.pair = Pair(
            folder,
            model,
            # Whoever stands still is not lost.
            {"backend": backend, "liveness": 600.0, "deadline": 600.0} if backend else {},
            prefill=side,
            decode=side,
            policy="fail",
            own=({}, {"enable_prefix_caching": False}),
            max_model_len=longest + 2 * BLOCK,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=3 * (longest + 2 * BLOCK) * TOKEN,
        )
        self._numbers = itertools.count()

    def go_on(self) -> None:
        for engine in (self.pair.prefill, self.pair.decode):
            engine.go_on()

    def rest(self) -> None:
        for engine in (self.pair.prefill, self.pair.decode):
            engine.settle()
            engine.stop()

    def hand(self, prompt: Sequence[int]) -> Ended:
        """One request; what decode says of it."""
        _, second = self.pair.hand(prompt, 2, f"timed{next(self._numbers)}")
        if second.loaded is None or second.why != "length":
            raise AssertionError(f"state was not loaded: {second}\n{self.pair.decode.logged()[-6000:]}")
        return second

    def turn(self, prompt: Sequence[int]) -> float:
        """Seconds that the state of a request took."""
        self.go_on()
        took: float | None = self.hand(prompt).loaded
        self.rest()
        assert took is not None
        return took


def measure(ours: Way, theirs: Way, backend: str, length: int, rounds: int) -> Row:
    prompt = prompt_of(length, length)
    for way in (ours, theirs):
        way.go_on()
        alone = way.pair.alone(prompt, 2)
        if way.hand(prompt).tokens != alone:
            raise AssertionError(f"the tokens of {length} are not those of one engine")
        way.rest()

    def timed(way: Way) -> Callable[[], float]:
        return lambda: way.turn(prompt)

    ways = {"ours": timed(ours), "again": timed(ours), "theirs": timed(theirs)}
    found = list(in_turn(ways, rounds, WARM))
    took = {name: [row[name] for row in found] for name in ways}
    return {
        "tokens": length,
        "MiB": round(-(-length // BLOCK) * BLOCK * TOKEN / (1 << 20), 1),
        "statelink": backend,
        "ratio": str(ratio(took["ours"], took["theirs"])),
        "noise": str(ratio(took["ours"], took["again"])),
        "ms_ours": _ms(took["ours"]),
        "ms_theirs": _ms(took["theirs"]),
    }


def _ms(took: Sequence[float]) -> float:
    return round(statistics.median(took) * 1e3, 2)


@contextlib.contextmanager
def ways(backend: str, model: Path, folder: Path, longest: int) -> Iterator[tuple[Way, Way]]:
    """Statelink's engines, and those of vLLM's connector."""
    ours = Way(backend, model, folder / f"statelink-{backend}", longest)
    with running(ours.pair):
        ours.rest()
        theirs = Way("", model, folder / "nixl", longest)
        with running(theirs.pair):
            theirs.rest()
            yield ours, theirs


def measured(arguments: argparse.Namespace, model: Path) -> Iterator[Row]:
    """Every row that was asked for."""
    for backend in arguments.backend:
        with ways(backend, model, arguments.out / "vllm-logs", max(arguments.length)) as (ours, theirs):
            for length in arguments.length:
                yield measure(ours, theirs, backend, length, arguments.rounds)


def table(rows: Sequence[Row]) -> str:
    """Rows as markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)])


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["nixl"], help="Statelink's backends")
    parser.add_argument("--length", nargs="+", type=int, default=[100, 1000, 4000], help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of each ratio")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measured(arguments, make_wide(Path(folder) / "wide")):
            print(json.dumps(row), flush=True)
            found.append(row)
            # After each row, so that an interrupted run leaves what it has.
            said = {"rounds": arguments.rounds, "rows": found}
            (arguments.out / "vllm.json").write_text(json.dumps(said, indent=1) + "\n")
    (arguments.out / "vllm.md").write_text(table(found) + "\n")
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
