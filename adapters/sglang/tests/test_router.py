"""SGLang's own router in front of two prefill servers and two decode servers, one of which dies and comes back."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from engine_environments import SGLANG
from engine_processes import OwnProcess, free_port, running
from support.models import VOCABULARY, generate
from support.servers import Pair

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

COUNT = 6
AT_ONCE = 6


class Fleet(NamedTuple):
    """A router's port, and the pairs of servers behind it."""

    port: int
    pairs: tuple[Pair, Pair]

    def post(self, prompt: list[int]) -> tuple[int, Any]:
        """The status and the body of the router's answer."""
        params = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": params}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", body)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def burst(self, first: int, count: int, model: Path) -> list[tuple[int, Any]]:
        """Post requests, some at once. Every answer that is one has the right tokens. Returns the others."""
        prompts = [
            random.Random(seed).sample(range(4, VOCABULARY), 20 + seed % 60) for seed in range(first, first + count)
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(self.post, prompts))
        for prompt, (status, body) in zip(prompts, answers, strict=True):
            if status == 200:
                assert body["output_ids"] == generate(model, prompt, COUNT)
        return [answer for answer in answers if answer[0] != 200]


@pytest.fixture(scope="module")
def fleet(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = {"backend": "tcp", "verify": "digest"}
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    with contextlib.ExitStack() as stack:
        pairs = [Pair(folder, llama, config, common=common) for folder in folders]
        for pair in pairs:
            stack.enter_context(running(pair))
        port = free_port()
        behind = []
        for pair in pairs:
            behind += ["--prefill", f"http://127.0.0.1:{pair.prefill.port}", str(pair.bootstrap_port)]
            behind += ["--decode", f"http://127.0.0.1:{pair.decode.port}"]
        command = [
            *(sys.executable, "-W", "ignore", "-m", "sglang_router.launch_router", "--pd-disaggregation", *behind),
            *("--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(free_port()), "--retry-max-retries", "3"),
            *("--health-check-interval-secs", "2", "--health-failure-threshold", "2"),
        ]
        router = OwnProcess("router", folders[0], command, SGLANG)
        stack.callback(router.kill)
        made = Fleet(port, (pairs[0], pairs[1]))
        until = time.monotonic() + 120
        while not _answers(made):
            assert router.running, router.logged()
            assert time.monotonic() < until, router.logged()[-4000:]
            time.sleep(1)
        yield made


def _answers(fleet: Fleet) -> bool:
    try:
        return fleet.post([5, 6, 7])[0] == 200
    except OSError:
        return False


def _took(pair: Pair, role: str) -> int:
    server = getattr(pair, role)
    return int(server.logged().count('"POST /generate HTTP/1.1" 200'))


def test_every_server_has_a_part_and_every_answer_is_right(fleet: Fleet, llama: Path) -> None:
    assert fleet.burst(3000, 30, llama) == []
    for pair in fleet.pairs:
        assert _took(pair, "prefill") > 5
        assert _took(pair, "decode") > 5


def test_a_prefill_that_dies_under_load_and_comes_back(fleet: Fleet, llama: Path) -> None:
    dying = fleet.pairs[1]
    with ThreadPoolExecutor(1) as pool:
        during = pool.submit(fleet.burst, 3100, 30, llama)
        time.sleep(1.0)
        dying.prefill.kill()
        failed = during.result()
    # The router does not try another pair for a request that it had sent there.
    assert len(failed) <= AT_ONCE
    for pair in fleet.pairs:
        assert pair.decode.running
    until = time.monotonic() + 60
    while fleet.burst(3200, 6, llama):  # until the router has noticed
        assert time.monotonic() < until
    assert fleet.burst(3300, 20, llama) == []
    dying.prefill = dying.start("prefill", port=dying.prefill.port)
    dying.prefill.wait_ready()
    before, until = _took(dying, "prefill"), time.monotonic() + 60
    while _took(dying, "prefill") <= before + 3:
        assert fleet.burst(3400, 10, llama) == []
        assert time.monotonic() < until
    for pair in fleet.pairs:
        assert pair.decode.running
