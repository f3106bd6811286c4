"""A stream that moves between two decode servers: the pause that its client sees.

Two decode servers and a prefill server of vLLM are behind `examples/moving_router.py`. A client reads one stream, and
an operator has it moved back and forth. The state is that of the prompt and of all that was generated. Measured are

    pause      the longest time between two tokens that the client gets, around a move
    transfer   the mean time that the state takes, by Statelink's own reports of the receivers
    step       the median time between two tokens while nothing moves
    computed   the time to the first token of a server that computes the same tokens in place of taking their state

``over`` is a pause over the transfer and two steps: the median, with the bounds of 95 of 100 resamples. The tokens are
compared with those of one server. Nothing is asserted on time.

Each server has its worker in its engine core, as vLLM has it on a card, and gives a token before it computes the next
one. Otherwise processes that spin would share two cores. The prefill server stands still while streams move.
"""

from __future__ import annotations

import http.client
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_processes import HttpServer
from support.engines import prompt_of, transfer
from support.models import make_hybrid, make_wide
from support.servers import Answer, Server

from benchmarks.pairs import ratio

if TYPE_CHECKING:
    import argparse

__all__ = ["MODELS", "report"]

Row = dict[str, Any]

ROUTER = Path(__file__).parents[2] / "examples" / "moving_router.py"
KEY = "open sesame, open"
BETWEEN = 16
"""Tokens between two moves."""
AROUND = 4
"""Tokens behind a move that belong to it."""


def _make_long_hybrid(folder: Path) -> Path:
    """Three Mamba2 layers, and one of full attention with four KV heads of 32."""
    made: Path = make_hybrid(folder, max_position_embeddings=16384, num_key_value_heads=4)
    return made


MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "full attention": (make_wide, 1 << 15),
    "Mamba 2 and full attention": (_make_long_hybrid, 1 << 12),
}
"""How each model is made, and bytes enough for a token's state."""


class _Router(HttpServer[Answer]):
    answers = Answer


class _Stream:
    """A client that reads a stream, in a thread of its own.

    Attributes:
        tokens: What it has got.
        times: When it got each of them, in seconds.
    """

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._heard = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._read, args=(port, {**body, "stream": True}))
        self._thread.start()

    def _read(self, port: int, body: dict[str, Any]) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                for line in answer:
                    now = time.perf_counter()
                    if line.startswith(b"data: {"):
                        new = [token for each in json.loads(line[6:])["choices"] for token in each["token_ids"] or ()]
                        with self._heard:
                            self.tokens += new
                            self.times += [now] * len(new)
                            self._heard.notify_all()
        finally:
            with self._heard:
                self._over = True
                self._heard.notify_all()

    def wait(self, count: int) -> None:
        """Return once it has so many tokens."""
        with self._heard:
            self._heard.wait_for(lambda: self._over or len(self.tokens) >= count, 300)
        if len(self.tokens) < count:
            raise AssertionError(f"the stream has {len(self.tokens)} tokens, and not {count}")

    def end(self) -> None:
        """Return once it has ended."""
        self._thread.join(300)


class Fleet:
    """Servers of one model, and the router.

    Args:
        backend: Statelink's.
        name: The model, one of `MODELS`.
        folder: For the model.
        logs: For logs.
        most: Tokens of the longest prompt.
        moves: Moves of a stream.
    """

    def __init__(self, backend: str, name: str, folder: Path, logs: Path, most: int, moves: int) -> None:
        make, nbytes = MODELS[name]
        logs.mkdir(parents=True, exist_ok=True)
        model, key = make(folder / name.replace(" ", "-")), logs / "key"
        key.write_text(KEY)
        self.count = (moves + 1) * BETWEEN
        length = most + self.count + 64
        options = [
            *("--max-model-len", str(length), "--kv-cache-memory-bytes", str(3 * length * nbytes + (32 << 20))),
            *("--distributed-executor-backend", "uni", "--no-async-scheduling"),
            *("--max-num-batched-tokens", "512", "--no-enable-prefix-caching"),
        ]
        # Whoever stands still is not lost.
        config = {"backend": backend, "liveness": 600.0, "deadline": 600.0, "vllm": {"move_key_file": str(key)}}
        with ExitStack() as stack:

            def server(each: str) -> Server:
                given = transfer(config, kv_role="kv_both", engine_id=each)
                # Triton's interpreter, which the second runner needs here, takes longer than a transfer.
                environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
                made = Server(each, logs, model, given, *options, environment=environment)
                stack.callback(made.kill)
                return made

            self.prefill, *self.decode = (server(each) for each in ("prefill-0", "decode-0", "decode-1"))
            urls = [f"http://127.0.0.1:{each.port}" for each in (self.prefill, *self.decode)]
            command = [sys.executable, "-W", "ignore", str(ROUTER), "--move-key-file", str(key), "--prefill", urls[0]]
            self.router = _Router("router", logs, [*command, "--decode", urls[1], "--decode", urls[2]], {})
            stack.callback(self.router.kill)
            for each in (self.prefill, *self.decode, self.router):
                each.wait_ready()
            self._urls = urls[1:]
            self.kill = stack.pop_all().close

    def _operate(self, path: str, place: int) -> Any:
        answer = self.router.ask(path, {"server": self._urls[place]})
        if answer.status != 200:
            raise AssertionError(f"{path} of {self.decode[place].name}: {answer}")
        return answer.body

    def _transfers(self) -> list[float]:
        """How many transfers the decode servers have received, and their seconds."""
        return [sum(sum(each.metric(f"{REPORTED}_{what}")) for each in self.decode) for what in ("count", "sum")]

    def stream(self, prompt: Sequence[int], moves: int) -> tuple[list[float], float, list[float]]:
        """One stream that moves so often.

        Returns:
            The seconds of each pause, the mean of all transfers, and the seconds between two tokens otherwise.
        """
        body = self.prefill.body(prompt, self.count)
        alone = self.prefill.ask("/v1/completions", body).tokens
        before = self._transfers()
        self._operate("/use", 0)
        self._operate("/drain", 1)
        stream, here = _Stream(self.router.port, body), 0
        stream.wait(1)
        self.prefill.stop()
        pauses, moved = list[float](), set[int]()
        for number in range(moves):
            stream.wait((number + 1) * BETWEEN)
            self._operate("/use", 1 - here)
            first = len(stream.times)
            said = self._operate("/drain", here)
            if len(said.get("moved", ())) != 1:
                raise AssertionError(f"the stream does not move: {said}")
            stream.wait(first + AROUND)
            pauses.append(max(_gaps(stream.times[first - 1 : first + AROUND])))
            moved |= set(range(first - 1, first + AROUND))
            here = 1 - here
        stream.end()
        self.prefill.go_on()
        if stream.tokens != alone:
            raise AssertionError("the tokens of a stream that moved are not those of one server")
        until = time.monotonic() + 30
        while (after := self._transfers())[0] < before[0] + moves + 1:
            if time.monotonic() > until:
                raise AssertionError(f"{after[0] - before[0]:g} transfers, and not {moves + 1}")
            time.sleep(0.2)
        steps = [gap for place, gap in enumerate(_gaps(stream.times)) if place > 0 and place not in moved]
        return pauses, (after[1] - before[1]) / (after[0] - before[0]), steps

    def computed(self, tokens: Sequence[int]) -> float:
        """Seconds until a decode server, which has no state of these tokens, has the next one."""
        began = time.perf_counter()
        self.decode[0].complete(tokens, 1)
        return time.perf_counter() - began


REPORTED = "vllm:statelink_transfer_seconds"


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def report(arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """A row for each backend, model, and length of a prompt."""
    for backend in arguments.backend:
        for name in MODELS:
            logs = arguments.out / "vllm-logs-moves" / f"{backend}-{name.replace(' ', '-')}"
            fleet = Fleet(backend, name, folder, logs, max(arguments.length), arguments.rounds)
            try:
                for length in arguments.length:
                    yield {"statelink": backend, "model": name, **_row(fleet, length, arguments.rounds)}
            finally:
                fleet.kill()


def _row(fleet: Fleet, length: int, moves: int) -> Row:
    fleet.stream(prompt_of(length + 1, length), 2)  # links meet, and servers compile what they compile once
    pauses, transfer_s, steps = fleet.stream(prompt_of(length, length), moves)
    allowed = transfer_s + 2 * statistics.median(steps)
    return {
        "tokens": length,
        "pause_ms": _ms(pauses),
        "transfer_ms": _ms([transfer_s]),
        "step_ms": _ms(steps),
        "over": str(ratio(pauses, [allowed] * moves)),
        "computed_ms": _ms([fleet.computed(prompt_of(length + 2, length))]),
    }


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 1)
