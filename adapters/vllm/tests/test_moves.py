"""A rolling restart of two decode servers behind the router of the examples: every stream goes on, token for token."""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_processes import HttpServer
from support.engines import prompt_of, transfer
from support.families import FAMILIES, add_mtp
from support.servers import Answer, Server

pytestmark = pytest.mark.servers

ROUTER = Path(__file__).parents[3] / "examples" / "moving_router.py"
KEY = "open sesame, open"
LONG = 64
"""Tokens of an answer."""
DRAFTING = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}', "--no-async-scheduling")
"""See `test_speculation`."""


class Router(HttpServer[Answer]):
    """The router of the examples."""

    answers = Answer

    def __init__(self, folder: Path, prefill: Server, decode: Sequence[Server], key: Path) -> None:
        servers = [("--prefill", prefill), *(("--decode", each) for each in decode)]
        command = [sys.executable, "-W", "ignore", str(ROUTER), "--move-key-file", str(key)]
        for option, server in servers:
            command += [option, f"http://127.0.0.1:{server.port}"]
        self.decode = {each.name: f"http://127.0.0.1:{each.port}" for each in decode}
        self.model = prefill.model
        super().__init__("router", folder, command, {})


class Fleet:
    """A prefill server, two decode servers, and the router."""

    def __init__(self, folder: Path, model: Path, common: Sequence[str], own: Mapping[str, Sequence[str]]) -> None:
        self.folder, self.model, self.key = folder, model, folder / "key"
        self._common, self._own = common, own
        self.key.write_text(KEY)
        self.prefill = self.server("prefill-0")
        self.decode = {name: self.server(name) for name in ("decode-0", "decode-1")}
        self.router = Router(folder, self.prefill, list(self.decode.values()), self.key)
        for each in (self.prefill, *self.decode.values(), self.router):
            each.wait_ready()

    def server(self, name: str, port: int = 0) -> Server:
        config = transfer(
            {"backend": "tcp", "verify": "digest", "liveness": 30.0, "vllm": {"move_key_file": str(self.key)}},
            kv_role="kv_both",
            engine_id=name,
        )
        options = ("--shutdown-timeout", "60", "--kv-cache-memory-bytes", str(24 << 20), "--no-enable-prefix-caching")
        return Server(
            name, self.folder, self.model, config, *options, *self._common, *self._own.get(name, ()), port=port
        )

    def kill(self) -> None:
        for each in (self.router, self.prefill, *self.decode.values()):
            each.kill()

    def restart(self, name: str) -> None:
        """End a decode server as a supervisor does, and start it again at the same port."""
        old = self.decode[name]
        old.terminate()
        assert old.wait_end(90) == 0
        assert re.search(r"is drained: [1-9]", old.logged())
        self.decode[name] = self.server(name, old.port)
        self.decode[name].wait_ready()
        # The first steps of a server are slow, and streams would end elsewhere.
        self.decode[name].complete([5, 6, 7], 4)
        assert self.router.ask("/use", {"server": self.router.decode[name]}).status == 200


class Stream:
    """A client that reads a stream of tokens."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self._port, self._body = port, body
        self.prompts: list[list[int]] = []
        self.tokens: list[int] = []
        self.why: str | None = None

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(self._body), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    self.tokens += choice["token_ids"] or []
                    self.prompts += [choice["prompt_token_ids"]] if choice.get("prompt_token_ids") else []
                    self.why = choice["finish_reason"] or self.why


@pytest.fixture(scope="module", params=["llama", "windowed", "hybrid", "latents, MTP", "TP 2 and TP 1"])
def fleet(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    common, own = tuple[str, ...](), dict[str, Sequence[str]]()
    if request.param == "latents, MTP":
        model = add_mtp(FAMILIES["DeepSeek V3"](models / "without-mtp"), models / "mtp")
        common = (*DRAFTING, "--max-num-batched-tokens", "1024")
    elif request.param == "TP 2 and TP 1":
        model, own = request.getfixturevalue("llama"), {"decode-0": ("--tensor-parallel-size", "2")}
    else:
        model = request.getfixturevalue(request.param)
    made = Fleet(tmp_path_factory.mktemp("fleet"), model, common, own)
    try:
        yield made
    finally:
        made.kill()


def body_of(fleet: Fleet, number: int) -> dict[str, Any]:
    """The body of a stream. Some count what was generated."""
    counts = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "min_tokens": LONG} if number % 3 == 2 else {}
    body: dict[str, Any] = fleet.prefill.body(prompt_of(number, (5, 60, 130, 333, 64, 90)[number % 6]), LONG) | counts
    return body


@pytest.mark.shows("moves a running request to another server: by SIGTERM, and as an operator asks")
def test_a_rolling_restart_loses_and_changes_no_token(fleet: Fleet) -> None:
    bodies = [body_of(fleet, number) for number in range(6)]
    wanted = [fleet.prefill.ask("/v1/completions", body).tokens for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        for act in (
            lambda: fleet.router.ask("/drain", {"server": fleet.router.decode["decode-0"]}).body["stay"],
            lambda: fleet.router.ask("/use", {"server": fleet.router.decode["decode-0"]}).body,
            lambda: fleet.restart("decode-0"),
            lambda: fleet.restart("decode-1"),
        ):
            streams = [Stream(fleet.router.port, body | {"stream": True}) for body in bodies]
            running = [pool.submit(each.run) for each in streams]
            wait_begun(streams)
            act()
            for each in running:
                each.result(timeout=300)
            assert [each.tokens for each in streams] == wanted
            assert [each.prompts for each in streams] == [[body["prompt"]] for body in bodies]
            assert {each.why for each in streams} == {"length"}
    for server in (fleet.prefill, *fleet.decode.values()):
        server.wait_usage(False)


def wait_begun(streams: Sequence[Stream]) -> None:
    """Return once each stream has some tokens."""
    until = time.monotonic() + 120
    while min(len(each.tokens) for each in streams) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
