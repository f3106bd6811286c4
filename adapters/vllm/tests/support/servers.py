"""Real vLLM servers on the CPU, each with its API server, engine core and workers, and a router that does the least."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import engine_processes
from engine_environments import VLLM, completion, python_of
from engine_processes import HttpServer

from .engines import PREFILL, transfer
from .forks import fork

if TYPE_CHECKING:
    from pathlib import Path


PREFILL_NAME = "prefill-0"
"""The name of the prefill server among the instances of a fleet."""


ON_A_CPU = (
    *("--skip-tokenizer-init", "--enforce-eager"),
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(16 << 20)),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--block-size", "32"),
    *("--compilation-config", '{"custom_ops": ["none"]}'),
)
"""Options with which a server runs a tiny model here. Prefill takes 64 tokens at a time."""


class Answer(engine_processes.Answer):
    """The same, as vLLM fills it."""

    @property
    def tokens(self) -> list[int]:
        found: list[int] = self.body["choices"][0]["token_ids"]
        return found


class Server(HttpServer[Answer]):
    """One server, and everything that it started.

    Args:
        name: For messages, and for the log.
        folder: Where the log is.
        model: The model.
        config: Its ``kv_transfer_config``.
        options: Further options of its command line.
        environment: Changes to its environment.
        ordinary: Whether it is an ordinary process, and not forked by one that has imported vLLM. It has vLLM's first
            model runner; a forked one has the second, as on a GPU.
        port: Where it listens; a free port if it is 0.
    """

    answers = Answer

    def __init__(
        self,
        name: str,
        folder: Path,
        model: Path,
        config: dict[str, Any],
        *options: str,
        environment: Mapping[str, str] | None = None,
        ordinary: bool = False,
        port: int = 0,
    ) -> None:
        self._ordinary = ordinary
        self._key = (environment or {}).get("VLLM_API_KEY")
        self.model = str(model)
        command = [
            *(python_of(name), "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve", self.model),
            *(*ON_A_CPU, "--kv-transfer-config", json.dumps(config), *options),
        ]
        runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(not ordinary))}
        super().__init__(name, folder, command, {**VLLM, **runner, **(environment or {})}, port)

    def _start(self, command: Sequence[str], environment: dict[str, str], pipes: dict[str, Any]) -> Any:
        if self._ordinary:
            return super()._start(command, environment, pipes)
        with self.log.open("ab") as log:
            arguments = command[command.index("serve") + 1 :]
            return fork("serve", arguments, environment, log, triton=True, python=command[0])

    def ask(
        self,
        path: str,
        body: Any = None,
        timeout: float = engine_processes.ANSWER_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The same, with the server's key if it wants one."""
        key = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return super().ask(path, body, timeout, {**key, **(headers or {})})

    def complete(
        self, prompt: Sequence[int], count: int, params: dict[str, Any] | None = None, rank: int | None = None
    ) -> Answer:
        """The completion of a prompt of token ids. With a rank, by that rank of data parallelism."""
        return self.ask("/v1/completions", self.body(prompt, count, params), headers=pinned(rank))

    def body(self, prompt: Sequence[int], count: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """The body of such a request."""
        body = completion(self.model, prompt, count)
        return body if params is None else {**body, "kv_transfer_params": params}

    @contextlib.contextmanager
    def client(
        self, prompt: Sequence[int], count: int, params: dict[str, Any] | None = None, rank: int | None = None
    ) -> Iterator[None]:
        """A client that asks for a completion and, at the end of the block, goes away without waiting for it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            body = json.dumps(self.body(prompt, count, params))
            headers = {"Content-Type": "application/json", **pinned(rank)}
            connection.request("POST", "/v1/completions", body, headers)
            yield
        finally:
            connection.close()

    def metric(self, name: str) -> list[float]:
        """The values of one of vLLM's metrics, with any labels."""
        lines = self.ask("/metrics").body.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]

    def wait_counted(self, name: str, count: float, seconds: float = 30.0) -> None:
        """Return once a metric has been counted so often. vLLM carries what workers counted with a later step."""
        until = time.monotonic() + seconds
        while sum(self.metric(name)) < count:
            assert time.monotonic() < until, f"{self.name}: {name} is {self.metric(name)}, and not {count}"
            time.sleep(0.2)

    def usage(self) -> float:
        """The share of the blocks of vLLM's pool that are in use, by vLLM's own metrics."""
        return max(self.metric("vllm:kv_cache_usage_perc"))

    def wait_usage(self, some: bool, seconds: float = 60.0) -> None:
        """Return once some blocks are in use, or none."""
        until = time.monotonic() + seconds
        while (self.usage() > 0.0) != some:
            assert time.monotonic() < until, f"{self.name}: {self.usage():.3f} of the blocks are in use"
            time.sleep(0.05)


def pinned(rank: int | None) -> dict[str, str]:
    """The header that sends a request to a rank of data parallelism."""
    return {} if rank is None else {"X-data-parallel-rank": str(rank)}


class ServerPair:
    """A prefill server and a decode server.

    Args:
        folder: Where their logs are.
        model: The model.
        config: The connector's own options.
        prefill: Further options of prefill's command line.
        decode: The same for decode.
        own: What only prefill's connector has, and what only decode's has.
        around: Makes the ``kv_transfer_config`` of a server from that of the connector; it gets the server's name, too.
        environment: Changes to the environment of both.
        ordinary: See `Server`.
        more: Further arguments of `transfer` for both.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        config: dict[str, Any],
        *,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        own: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
        around: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda name, config: config,
        environment: Mapping[str, str] | None = None,
        ordinary: bool = False,
        **more: Any,
    ) -> None:
        producer, consumer = (
            transfer(config, more=each, kv_role=role, engine_id=name, **more)
            for each, role, name in zip(own, ("kv_producer", "kv_consumer"), (PREFILL_NAME, "decode-0"), strict=True)
        )
        sides = ("prefill", producer, prefill), ("decode", consumer, decode)
        self.prefill, self.decode = (
            Server(name, folder, model, around(name, given), *options, environment=environment, ordinary=ordinary)
            for name, given, options in sides
        )

    def settled(self) -> None:
        """Check that every block of both servers is free again."""
        for server in (self.prefill, self.decode):
            server.wait_usage(False)

    def route(self, prompt: Sequence[int], count: int = 8) -> Answer:
        """What a serial router does: prefill's ``kv_transfer_params`` go to decode as they are."""
        return self.decode.complete(prompt, count, self.route_params(prompt))

    def route_params(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What prefill answers to a serial router."""
        first = self.prefill.complete(prompt, 1, dict(PREFILL))
        assert first.status == 200, first
        params: dict[str, Any] = first.body["kv_transfer_params"]
        return params

    def route_to_both(self, prompt: Sequence[int], count: int, name: str) -> Answer:
        """What a concurrent router does: both servers get the request at once, and decode finds prefill by its name."""
        asked = {**PREFILL, "transfer_id": name}
        sent = {"do_remote_prefill": True, "transfer_id": name, "remote_engine_id": PREFILL_NAME}
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(self.prefill.complete, prompt, 1, asked)
            answer = self.decode.complete(prompt, count, sent)
            with contextlib.suppress(OSError, http.client.HTTPException):  # prefill may have been killed
                first.result()
        return answer
