"""Pairs of real servers with pipeline stages, and what they are asked."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_processes import running

from .models import generate, prompt_of
from .servers import Pair, Posted, Server

__all__ = ["RANKS", "STAGES", "agree", "answers_are_right", "flushed", "link", "pair_of", "storm"]

STAGES = ["--pp-size", "2"]
RANKS = ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--enable-dp-lm-head"]
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}
"""The core of each rank of a server. SGLang wants to know it, and takes the first ones of the list."""
FIRST_LAYERS = "SGLANG_PP_LAYER_PARTITION"
"""SGLang's variable with the number of layers of each stage."""


@contextlib.contextmanager
def pair_of(
    folder: Path,
    model: Path,
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    split: str = "2,3",
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """Two servers that are ready. A server with stages has as many layers in each as ``split`` says."""
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    given = {"backend": "tcp", "verify": "digest", **(config or {})}
    named = {**CORES, FIRST_LAYERS: split, **(environment or {})}
    with running(Pair(folder, model, given, common=common, prefill=prefill, decode=decode, environment=named)) as pair:
        yield pair


def answers_are_right(pair: Pair, model: Path) -> None:
    """Requests of one chunk and of several, alone and ten at once."""
    for length in (1, 5, 40, 100):
        prompt = prompt_of(length, length)
        first, second = pair.generate(prompt)
        expected = generate(model, prompt, 8)
        assert (first.tokens, second.tokens) == (expected[:1], expected)
    prompts = [prompt_of(500 + seed, 20 + 7 * seed) for seed in range(10)]
    bodies = [pair.body(prompt, 6) for prompt in prompts]
    posted = [(Posted(pair.prefill, body), Posted(pair.decode, body)) for body in bodies]
    for prompt, (_, late) in zip(prompts, posted, strict=True):
        assert late.answer().tokens == generate(model, prompt, 6)


def storm(pair: Pair, model: Path) -> None:
    """Aborts at any moment, on either side, and right requests after them."""
    draw = random.Random(11)
    bodies, posted = [], []
    for number in range(40):
        rid = f"storm-{number}"
        body = pair.body(prompt_of(1000 + number, draw.randrange(10, 300)), draw.randrange(1, 20), rid=rid)
        bodies.append(body)
        posted.append((Posted(pair.prefill, body), Posted(pair.decode, body)))
        if number % 4 != 3:
            server: Any = getattr(pair, draw.choice(["prefill", "decode"]))
            delay = draw.choice([0.0, 0.05, 0.3, 1.0])
            threading.Timer(delay, server.ask, ["/abort_request", {"rid": rid}]).start()
        time.sleep(draw.choice([0.0, 0.0, 0.1]))
    for body, both in zip(bodies, posted, strict=True):
        expected = generate(model, body["input_ids"], body["sampling_params"]["max_new_tokens"])
        for answer in (each.answer(200) for each in both):
            assert answer.status in (200, 400, 500, 503)
            if answer.status == 200:  # perhaps it was aborted on the way
                assert answer.tokens == expected[: len(answer.tokens)]
    for seed in range(4):
        prompt = prompt_of(2000 + seed, 60)
        assert pair.generate(prompt)[1].tokens == generate(model, prompt, 8)


def flushed(pair: Pair) -> None:
    """Both servers are idle, and hold the pages of no request: then SGLang flushes its caches."""
    for server in (pair.prefill, pair.decode):
        until = time.monotonic() + 60
        while (status := server.ask("/flush_cache", {}).status) != 200:
            assert time.monotonic() < until, status
            time.sleep(0.5)


def link(server: Server, stage: int) -> dict[str, Any]:
    """What the link of one stage does, as ``statelink inspect`` shows it."""
    listens = _links(server)[stage]
    command = [str(Path(sys.executable).with_name("statelink")), "inspect", "--json"]
    shown = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=False).stdout  # of other programs, too
    (found,) = (each for each in json.loads(shown) if each.get("address", "").partition("@")[0] == listens)
    return dict(found)


def _links(server: Server) -> list[str]:
    """Where the links of all stages listen."""
    found = re.findall(rf"this {server.name} rank (\d+) of \d+; its link listens at (\S+)", server.logged())
    return [address for _, address in sorted(found)]


def agree(pair: Pair, model: Path) -> None:
    """Both servers are idle in all of their stages, and go on.

    No link has a room or holds memory. All stages flushed their caches, or refused to, in the same rounds.
    """
    flushed(pair)
    prompt = prompt_of(14, 100)
    assert pair.generate(prompt)[1].tokens == generate(model, prompt, 8)
    # Of what was before this request, the last stage has done what the first one has done.
    for server in (pair.prefill, pair.decode):
        stages = range(len(_links(server)))
        for stage in stages:
            until = time.monotonic() + 60
            while any((shown := link(server, stage))["rooms"].values()):  # SGLang closes a room after it has answered
                assert time.monotonic() < until, (server.name, shown)
            assert (shown["quarantined"], shown["held_bytes"]) == ([], {}), shown
            # Of prefill, SGLang may take pages that are only read.
            assert server is pair.prefill or not shown["taken_back"], shown
        refused = [line for line in server.logged().splitlines() if "Cache not flushed" in line]
        assert len({sum(f"PP{stage}]" in line for line in refused) for stage in stages}) == 1, (server.name, refused)
