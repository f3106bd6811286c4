"""Prompts through SGLang's real servers and Statelink, with Python's switch interval and with a shorter one in turn."""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_processes import running
from support.models import VOCABULARY, make_llama
from support.servers import Pair, Posted

from benchmarks.pairs import in_turn, ratio

__all__ = ["servers"]

Row = dict[str, Any]
LENGTHS = (200, 1500)
"""Tokens of the prompts."""
COMMON = ("--page-size", "16", "--max-total-tokens", "16384", "--chunked-prefill-size", "2048", "--disable-radix-cache")
ENVIRONMENT = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
EACH, WARM, SETTLE = 4, 2, 0.05


def servers(backend: str, interval: float, folder: Path, rounds: int) -> Iterator[Row]:
    """Times from a request's arrival at both servers until decode answers with one token. One request at a time.

    Args:
        backend: Of Statelink.
        interval: Seconds of the shorter switch interval.
        folder: For logs.
        rounds: Pairs of each ratio.
    """
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(tempfile.TemporaryDirectory())
        model = make_llama(Path(given) / "llama", 2 * max(LENGTHS), 4)
        pairs = {}
        for name, more in (("python", {}), ("shorter", {"switch_interval": interval})):
            logs = folder / f"servers-{backend}-{name}"
            logs.mkdir(parents=True, exist_ok=True)
            config = {"backend": backend, **more}
            pair = Pair(logs, model, config, common=COMMON, environment=ENVIRONMENT, ordinary=True)
            pairs[name] = stack.enter_context(running(pair))
            _rest(pair)
        for tokens in LENGTHS:
            found = list(in_turn({name: _turns(pair, tokens) for name, pair in pairs.items()}, rounds, WARM))
            took = {name: [row[name] for row in found] for name in pairs}
            yield {
                "tokens": tokens,
                "statelink": backend,
                "switch_interval": interval,
                "ratio": str(ratio(took["shorter"], took["python"])),
                **{f"ms_{name}": round(statistics.median(each) * 1e3, 3) for name, each in took.items()},
            }


def _turns(pair: Pair, tokens: int) -> Callable[[], float]:
    def turn() -> float:
        for server in (pair.prefill, pair.decode):
            server.go_on()
        time.sleep(SETTLE)
        took = statistics.median(_request(pair, tokens) for _ in range(EACH))
        _rest(pair)
        return took

    return turn


def _request(pair: Pair, tokens: int) -> float:
    body = pair.body([random.randrange(4, VOCABULARY) for _ in range(tokens)], 1)
    began = time.perf_counter()
    prefill, decode = Posted(pair.prefill, body), Posted(pair.decode, body)
    answer = decode.answer()
    took = time.perf_counter() - began
    if answer.status != 200 or prefill.answer().status != 200:
        raise RuntimeError(f"a server refused: {answer}, {prefill.answer()}")
    return took


def _rest(pair: Pair) -> None:
    """It is another pair's turn."""
    for server in (pair.prefill, pair.decode):
        server.stop()
