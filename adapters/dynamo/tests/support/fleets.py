"""Fleets of NVIDIA Dynamo on the CPU: its frontends, and its workers of one engine. No etcd, no NATS."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import engine_processes
from click.testing import CliRunner
from engine_environments import SGLANG, VLLM
from engine_processes import READY_SECONDS, HttpServer, OwnProcess, free_port

from statelink.cli import main

HERE = Path(__file__).parent
MODEL = "tiny"
LINK: dict[str, Any] = {"backend": "tcp", "verify": "digest"}
CANARY = 2
"""Seconds without a request after which Dynamo sends one to a worker, to see whether it is well."""
DEADLINE = 900.0
"""Seconds: longer than a test may take. What ends sooner has not waited for it."""

FAILING = "failing"
ROUTERS = ("round-robin", "kv")
"""Ways in which a frontend chooses workers: in turn, or by the prefixes that they hold."""

ENGINES: dict[str, dict[str, str]] = {
    # Dynamo's own format of SGLang's log leaves out what other packages log.
    "sglang": {**SGLANG, "GLOO_SOCKET_IFNAME": "lo", "DYN_SKIP_SGLANG_LOG_FORMATTING": "1"},
    "vllm": {
        **VLLM,
        "GLOO_SOCKET_IFNAME": "lo",
        "STATELINK_ABSENT_PACKAGES": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    },
}
"""Changes to the environment of a process with an engine."""


class Answer(engine_processes.Answer):
    """The same, as Dynamo's frontend fills it."""

    @property
    def tokens(self) -> list[int]:
        found: list[int] = self.body["nvext"]["completion_token_ids"]
        return found


class Stream(NamedTuple):
    """An answer that comes in parts. A list gets the tokens as they come."""

    tokens: list[int]
    parts: Iterator[dict[str, Any]]


class Frontend(HttpServer[Answer]):
    """Dynamo's frontend, which takes requests and routes them.

    Args:
        name: For messages, and for the log.
        folder: Where the log is.
        environment: Changes to its environment: where it finds workers.
        options: Of its command line.
    """

    answers = Answer

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], *options: str) -> None:
        self.port = free_port()
        command = [os.environ["STATELINK_DYNAMO_VLLM"], "-W", "ignore", "-m", "dynamo.frontend"]
        command += ["--http-host", "127.0.0.1", "--http-port", str(self.port), *options]
        OwnProcess.__init__(self, name, folder, command, environment)

    def complete(self, prompt: Sequence[int], count: int = 16, **more: Any) -> Answer:
        """The likeliest tokens after a prompt."""
        return self.ask("/v1/completions", body_of(prompt, count, **more), timeout=120)

    @contextlib.contextmanager
    def streamed(self, prompt: Sequence[int], count: int) -> Iterator[Stream]:
        """The same, in parts. At the end of the block, the client goes away."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        tokens: list[int] = []

        def parts() -> Iterator[dict[str, Any]]:
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                text = line.decode().strip().removeprefix("data: ")
                if text.startswith("{"):
                    part = json.loads(text)
                    tokens.extend((part.get("nvext") or {}).get("completion_token_ids") or ())
                    yield part

        try:
            body = json.dumps(body_of(prompt, count, stream=True))
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            yield Stream(tokens, parts())
        finally:
            connection.close()

    def workers(self) -> set[int]:
        """The ids of the workers that it knows."""
        with contextlib.suppress(OSError):  # it may be starting
            known = self.ask("/health", timeout=5).body["instances"]
            return {each["instance_id"] for each in known if each["endpoint"] == "generate"}
        return set()

    def serves(self) -> bool:
        """Whether it knows all that a request needs."""
        return bool(self.ask("/v1/models", timeout=5).body["data"])


def body_of(prompt: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
    """A request. Its answer has the ids of tokens, and of the workers that served it."""
    return {
        "model": MODEL,
        "prompt": " ".join(f"t{token}" for token in prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["completion_token_ids", "worker_id"]},
        **more,
    }


class Worker(OwnProcess):
    """One worker of Dynamo, with its engine.

    Args:
        name: For messages, and for the log.
        folder: Where the log is.
        command: Runs it.
        environment: Changes to its environment.
    """

    def __init__(self, name: str, folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.port = free_port()
        own = {
            "DYN_SYSTEM_PORT": str(self.port),
            "DYN_HEALTH_CHECK_ENABLED": "true",
            "DYN_CANARY_WAIT_TIME": str(CANARY),
        }
        super().__init__(name, folder, command, {**environment, **own})

    def interrupt(self) -> None:
        """End it as an operator does: it tells the others that it goes."""
        os.kill(self._process.pid, signal.SIGINT)
        self.wait_end(60)

    def stop_engine(self) -> None:
        """Stop what it has started, and not the process that speaks to frontends."""
        main = self._process.pid
        for child in Path(f"/proc/{main}/task/{main}/children").read_text().split():
            os.kill(int(child), signal.SIGSTOP)

    def metric(self, name: str) -> list[tuple[str, float]]:
        """The labels and values of one of the metrics of Dynamo and the engine."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        return [(labels, float(value)) for labels, value in found if 'endpoint="generate"' in labels]

    def served(self) -> int:
        """Requests of frontends that it has answered."""
        return int(sum(value for _, value in self.metric("dynamo_component_request_duration_seconds_count")))

    def id(self) -> int | None:
        """What Dynamo calls it, once it takes requests."""
        with contextlib.suppress(OSError):  # it may be starting
            for labels, _ in self.metric("dynamo_component_inflight_requests"):
                return int(labels.rpartition('worker_id="')[2].partition('"')[0], 16)
        return None

    def link(self) -> dict[str, Any]:
        """What its link does, as ``statelink inspect`` shows it."""
        (listens,) = set(re.findall(r"its link listens at (\S+)", self.logged()))
        shown = json.loads(CliRunner().invoke(main, ["inspect", "--json"]).stdout)  # of other programs, too
        (found,) = (each for each in shown if each.get("address", "").partition("@")[0] == listens)
        return dict(found)

    def wait_rooms(self, some: bool, seconds: float = 60.0) -> None:
        """Return once its link has rooms, or none and no memory that must not be used again."""
        until = time.monotonic() + seconds
        while True:
            shown = self.link()
            rooms = sum(shown["rooms"].values())
            if rooms if some else not rooms and not shown["held_bytes"] and not shown["quarantined"]:
                return
            assert time.monotonic() < until, (self.name, shown)
            time.sleep(0.1)

    def totals(self) -> dict[str, int]:
        """Rooms of its link that have ended, by outcome."""
        (found,) = self.link()["totals"]["rooms"].values() or ({},)  # a link has one role
        return dict(found)


class Fleet:
    """Frontends, and workers of one engine. Beside it, one worker that does both parts, with a frontend of its own.

    Args:
        engine: ``sglang`` or ``vllm``.
        folder: Where logs are, and where the parts of the fleet find each other.
        model: The model.

    Attributes:
        alone: The frontend of the worker that does both parts.
        engine: As given.
        frontends: A frontend of the fleet for each way to route in `ROUTERS`.
    """

    def __init__(self, engine: str, folder: Path, model: Path) -> None:
        self.engine, self._folder, self._model = engine, folder, model
        self._started = 0
        self._workers: dict[str, Worker] = {}
        self._environments = {name: self._environment(name) for name in ("alone", "fleet")}
        self.alone = Frontend("frontend-alone", folder, self._environments["alone"])
        self._one = self._start("alone")
        options = ["--migration-limit", "3", "--router-mode"]
        self.frontends = {
            router: Frontend(f"frontend-{router}", folder, self._environments["fleet"], *options, router)
            for router in ROUTERS
        }

    def _environment(self, name: str) -> dict[str, str]:
        """Of a fleet, whose parts find each other in a folder."""
        found = self._folder / name
        found.mkdir()
        return {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(found),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "PYTHONHASHSEED": "0",
            **ENGINES[self.engine],
        }

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def named(self, number: int) -> Worker:
        """The worker that Dynamo calls so."""
        (found,) = (worker for worker in self._workers.values() if worker.id() == number)
        return found

    def taken(self, worker: Worker) -> int:
        """Requests that the engine of a worker has taken, whoever sent them. It may count one twice."""
        if self.engine == "vllm":
            return int(sum(value for _, value in worker.metric("vllm:request_success_total")))
        return len(re.findall("Prefill batch|Submitted SGLang Request", worker.logged()))

    def up(self, *names: str) -> None:
        """Return once exactly these workers run, and every frontend knows them.

        The name of a worker begins with its role, ``prefill`` or ``decode``. There may be a hyphen and more behind it.
        With ``failing``, a worker of vLLM does not compute what it cannot load.
        """
        for name in set(self._workers) - set(names):
            self.stop(name)
        for name in names:
            if name not in self._workers or not self._workers[name].running:
                self._workers[name] = self._start(name)
        self._wait_known(self.alone, [self._one], serves=True)
        for frontend in self.frontends.values():
            self._wait_known(frontend, [*self._workers.values()], serves="prefill" in names)

    def _wait_known(self, frontend: Frontend, workers: list[Worker], *, serves: bool) -> None:
        until = time.monotonic() + READY_SECONDS
        while frontend.workers() != {worker.id() for worker in workers} or (serves and not frontend.serves()):
            for worker in workers:
                assert worker.running, f"{worker.name} ended:\n{worker.logged()[-6000:]}"
            assert time.monotonic() < until, (frontend.name, frontend.workers(), frontend.logged()[-3000:])
            time.sleep(0.5)

    def _start(self, name: str) -> Worker:
        self._started += 1
        role, _, kind = name.partition("-")
        command, more = {"sglang": self._sglang, "vllm": self._vllm}[self.engine](role, kind)
        # A worker that is started anew has a log of its own.
        environment = self._environments["alone" if role == "alone" else "fleet"]
        return Worker(f"{name}.{self._started}", self._folder, command, {**environment, **more})

    def _vllm(self, role: str, kind: str) -> tuple[list[str], dict[str, str]]:
        command = [
            *(os.environ["STATELINK_DYNAMO_VLLM"], "-W", "ignore", "-m", "dynamo.vllm"),
            *("--model", str(self._model), "--served-model-name", MODEL, "--enforce-eager", "--dtype", "float32"),
            *("--max-model-len", "1024", "--kv-cache-memory-bytes", str(16 << 20), "--max-num-seqs", "8"),
            *("--max-num-batched-tokens", "64", "--block-size", "32"),
            *("--compilation-config", '{"custom_ops": ["none"]}'),
        ]
        if role == "alone":
            return command, {}
        config = {
            "kv_connector": "StatelinkConnector",
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "kv_load_failure_policy": "fail" if kind == FAILING else "recompute",
            "kv_connector_extra_config": {**LINK, "deadline": DEADLINE},
        }
        return [*command, "--disaggregation-mode", role, "--kv-transfer-config", json.dumps(config)], {}

    def _sglang(self, role: str, kind: str) -> tuple[list[str], dict[str, str]]:
        command = [
            *(os.environ["STATELINK_DYNAMO_SGLANG"], "-W", "ignore", str(HERE / "worker_sglang.py")),
            *("--model-path", str(self._model), "--served-model-name", MODEL, "--device", "cpu", "--dtype", "float32"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disable-overlap-schedule", "--max-running-requests", "8", "--max-total-tokens", "2048"),
            *("--port", str(free_port())),
        ]
        if role == "alone":
            return command, {}
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "statelink"]
        command += ["--disaggregation-bootstrap-port", str(free_port())]
        if role == "decode":
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        return command, {"STATELINK_SGLANG_CONFIG": json.dumps(LINK)}

    def stop(self, name: str) -> None:
        """End a worker as an operator does."""
        worker = self._workers.pop(name)
        if worker.running:
            worker.interrupt()
            worker.kill()

    def settled(self) -> None:
        """Check that no worker has a room, or memory that it must not use again."""
        for worker in self._workers.values():
            worker.wait_rooms(False)

    def kill(self) -> None:
        """End everything."""
        for each in (self._one, self.alone, *self._workers.values(), *self.frontends.values()):
            each.kill()
