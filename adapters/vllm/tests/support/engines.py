"""Real vLLM engines on the CPU, each in a process of its own with its scheduler and worker, without a server."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from engine_environments import VLLM
from engine_processes import READY_SECONDS, OwnProcess, free_port

from .forks import fork
from .models import VOCABULARY

__all__ = [
    "TRANSFER",
    "Ended",
    "Engine",
    "Pair",
    "engine_options",
    "prompt_of",
    "transfer",
    "travel",
]

ANSWER_SECONDS = 180.0

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""What routers pass to prefill."""

TRANSFER = {"kv_connector": "StatelinkConnector", "kv_connector_module_path": "statelink_vllm"}


def transfer(config: dict[str, Any], policy: str = "recompute", **own: Any) -> dict[str, Any]:
    """A ``kv_transfer_config`` with the connector's own options."""
    more = own.pop("more", {})
    return {**TRANSFER, "kv_load_failure_policy": policy, "kv_connector_extra_config": {**config, **more}, **own}


def engine_options(model: Path, **more: Any) -> dict[str, Any]:
    """Arguments of vLLM's engine for a tiny model. Prefill takes 64 tokens at a time, and the scheduler runs ahead."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 16 << 20,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "async_scheduling": True,
        "compilation_config": {"custom_ops": ["none"]},
        **more,
    }


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt that begins as no other prompt does."""
    return random.Random(seed).choices(range(4, VOCABULARY), k=length)


class Ended(NamedTuple):
    """A request that ended.

    Attributes:
        tokens: Its tokens.
        logprobs: Their logprobs, if those were asked for.
        why: Why it ended.
        params: What a router gets.
        cached: How many tokens came from a cache.
        began: When it arrived. This and the next three are seconds on one clock, which processes of a machine share.
        loaded: When vLLM knew that its state was here; None if nothing was loaded.
        first: When vLLM gave its first token; None if it gave none.
        ended_at: When vLLM gave its last token.
    """

    tokens: list[int]
    logprobs: list[float]
    why: str
    params: dict[str, Any] | None
    cached: int | None
    began: float
    loaded: float | None
    first: float | None
    ended_at: float


class Engine(OwnProcess):
    """One engine. Requests go in, and results are asked for later.

    Args:
        name: For messages, and for the log.
        folder: Where the log is.
        options: Arguments of vLLM's engine.
        ordinary: Whether it is an ordinary process, and not forked by one that has imported vLLM.
        runner: The version of vLLM's model runner; a GPU has 2. Triton's interpreter runs its kernels here, which only
            a forked process can do.
        space: The network namespace of an ordinary process, and its address there.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: dict[str, Any],
        *,
        ordinary: bool = False,
        runner: int = 2,
        space: tuple[str, str] | None = None,
    ) -> None:
        self._ordinary, self._runner = ordinary, 1 if ordinary else runner
        program = str(Path(__file__).with_name("engine_process.py"))
        inside = () if space is None else ("ip", "netns", "exec", space[0])
        super().__init__(
            name,
            folder,
            [*inside, sys.executable, "-W", "ignore", program, json.dumps(options)],
            {
                **VLLM,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_USE_V2_MODEL_RUNNER": str(int(self._runner == 2)),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),  # of vLLM's own NIXL connector
                # To UCX, both namespaces are one host, where it needs no network.
                **({} if space is None else {"VLLM_NIXL_SIDE_CHANNEL_HOST": space[1], "UCX_TLS": "^sm"}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._heard = threading.Condition()
        self._ready: dict[str, Any] = {}
        self._ended: dict[str, Ended] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._asked = self._moves = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _start(self, command: Sequence[str], environment: dict[str, str], pipes: dict[str, Any]) -> Any:
        if self._ordinary:
            return super()._start(command, environment, pipes)
        with self.log.open("ab") as log:
            return fork("engine", command[-1:], environment, log, piped=True, triton=self._runner == 2)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._heard:
                if "ready" in said:
                    self._ready = said
                elif "answer" in said:
                    self._answers[said["answer"]] = said
                else:
                    name = said.pop("ended").rsplit("-", 1)[0] if "ended" in said else ""
                    self._ended[name] = Ended(**said)
                self._heard.notify_all()
        with self._heard:
            self._heard.notify_all()

    def _tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _wait(self, found: Callable[[], Any], seconds: float, what: str) -> Any:
        until = time.monotonic() + seconds
        with self._heard:
            while not found():
                left = until - time.monotonic()
                assert self.running, f"{self.name} ended:\n{self.logged()[-6000:]}"
                assert left > 0, f"{self.name}: no {what} after {seconds:g} s:\n{self.logged()[-6000:]}"
                self._heard.wait(min(left, 1.0))
            return found()

    def wait_ready(self) -> Engine:
        self._wait(lambda: self._ready, READY_SECONDS, "sign of being ready")
        return self

    @property
    def groups(self) -> list[str]:
        """vLLM's groups of layers, by the class of their specification."""
        return list(self._ready["groups"])

    @property
    def free(self) -> int:
        """Blocks that were free at the start."""
        return int(self._ready["free"])

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        count: int = 8,
        params: dict[str, Any] | None = None,
        *,
        logprobs: bool = False,
    ) -> None:
        self.add_all([(name, prompt, count, params)], logprobs=logprobs)

    def add_all(
        self, requests: Sequence[tuple[str, Sequence[int], int, dict[str, Any] | None]], *, logprobs: bool = False
    ) -> None:
        """Add requests before the next step: for each its name, prompt, number of tokens, and params."""
        names = "id", "prompt", "count", "params"
        self._tell(add=[dict(zip(names, each, strict=True)) | {"logprobs": logprobs} for each in requests])

    def abort(self, name: str) -> None:
        self._tell(abort=[name])

    @contextmanager
    def blind(self) -> Iterator[None]:
        """Within the block, it says the same of every request, as if nobody compared which request both sides hold."""
        self._tell(blind=True)
        try:
            yield
        finally:
            self._tell(blind=False)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block, the connector hears of no layer, as if each step were one graph."""
        self._tell(whole=True)
        try:
            yield
        finally:
            self._tell(whole=False)

    def result(self, name: str, seconds: float = ANSWER_SECONDS) -> Ended:
        found: Ended = self._wait(lambda: self._ended.get(name), seconds, f"result of {name}")
        return found

    def run(
        self,
        name: str,
        prompt: Sequence[int],
        count: int = 8,
        params: dict[str, Any] | None = None,
        *,
        logprobs: bool = False,
    ) -> Ended:
        self.add(name, prompt, count, params, logprobs=logprobs)
        return self.result(name)

    def ask(self) -> dict[str, Any]:
        """Whether it is busy, how many blocks are free, and what its link counts.

        ``preempted`` is how often vLLM took the blocks of a running request away, ``lengths`` how many tokens each
        running request has, with its prompt's, and ``waiting`` how many rooms the other side knows of while nothing of
        them has moved. ``chunks`` has for each room that has ended in how many
        parts it moved. ``forwards`` has when each of the last forward passes of a model began and ended, with the first
        model runner. ``drafted`` has what was drafted in each step since it was asked before, for one of the requests,
        with the second.
        """
        self._asked += 1
        number = self._asked
        self._tell(ask=number)
        answer: dict[str, Any] = self._wait(lambda: self._answers.get(number), ANSWER_SECONDS, "answer")
        return answer

    def wait_length(self, name: str, count: int) -> None:
        """Wait until a request has so many tokens, with its prompt's, or has ended."""
        until = time.monotonic() + ANSWER_SECONDS
        while name not in self._ended and self.ask()["lengths"].get(name, 0) < count:
            assert time.monotonic() < until, f"{self.name}: {name} is not so long:\n{self.logged()[-6000:]}"

    def move(self, key: str, *names: str) -> dict[str, Any]:
        """Ask for a move of these requests, or of all. Returns what it says: which move, and why others stay."""
        self._moves += 1
        asked = {"move": list(names) or True, "key": key}
        return self.run(f"move{self._moves}", [1], 1, asked).params or {}

    def settle(self, seconds: float = 60.0) -> int:
        """Wait until it has nothing to do, and return the number of free blocks."""
        until = time.monotonic() + seconds
        while (answer := self.ask())["busy"]:
            assert time.monotonic() < until, f"{self.name} is still busy: {answer}\n{self.logged()[-6000:]}"
            time.sleep(0.02)
        return int(answer["free"])


def travel(key: str, engines: Sequence[Engine], prompt: Sequence[int], count: int, stay: int = 3) -> list[Ended]:
    """A request that begins on the first engine, and moves to the next one after some tokens.

    Args:
        key: What engines want to be told.
        engines: All of them, in turn.
        prompt: Its prompt.
        count: How many tokens are wanted.
        stay: Tokens after which it moves; a few more come until it does.
    """
    tokens, answers = list(prompt), list[Ended]()
    for place, engine in enumerate(engines):
        name = f"travels{len(prompt)}.{place}"
        left = count + len(prompt) - len(tokens)
        engine.add(name, tokens, left, answers[-1].params if answers else None)
        if place < len(engines) - 1:
            engine.wait_length(name, len(tokens) + stay)
            said = engine.move(key, name)
            assert [each.rsplit("-", 1)[0] for each in said["moved"]] == [name], said
        answers.append(engine.result(name))
        tokens += answers[-1].tokens
    return answers


class Pair:
    """A prefill engine and a decode engine.

    Args:
        folder: Where their logs are.
        model: The model.
        config: The connector's own options.
        prefill: What only prefill's ``kv_transfer_config`` has. Its key ``more`` adds to ``config``.
        decode: The same for decode.
        policy: What decode does with a request whose state does not come.
        own: Further arguments of prefill's engine, and of decode's.
        ordinary: See `Engine`.
        runner: See `Engine`.
        spaces: For each engine by its name, its ``space``; see `Engine`.
        common: Further arguments of both engines.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        config: dict[str, Any],
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        policy: str = "recompute",
        own: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
        ordinary: bool = False,
        runner: int = 2,
        spaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        **common: Any,
    ) -> None:
        self._folder = folder
        transfers = (
            {"kv_role": "kv_producer", **(prefill or {})},
            {"kv_role": "kv_consumer", **(decode or {})},
        )
        self._options = [
            engine_options(model, **common, **options, kv_transfer_config=transfer(config, policy, **each))
            for options, each in zip(own, transfers, strict=True)
        ]
        self._kind: dict[str, Any] = {"ordinary": ordinary, "runner": runner}
        self._spaces = spaces
        self.prefill, self.decode = self.start("prefill"), self.start("decode")
        self._number = 0

    def start(self, name: str) -> Engine:
        options, space = self._options[name == "decode"], self._spaces.get(name)
        return Engine(name, self._folder, options, space=space, **self._kind)

    def hand(
        self, prompt: Sequence[int], count: int = 8, name: str = "", *, logprobs: bool = False
    ) -> tuple[Ended, Ended]:
        """A request as a serial router passes it: prefill's answer goes to decode as it is."""
        self._number += 1
        name = name or f"request{self._number}"
        first = self.prefill.run(name, prompt, 1, dict(PREFILL))
        return first, self.decode.run(name, prompt, count, first.params, logprobs=logprobs)

    def check(self, prompt: Sequence[int], count: int = 8, within: float = 1e-3) -> Ended:
        """Hand a request: its tokens and their logprobs are those of one engine. Returns what decode gave."""
        _, handed = self.hand(prompt, count, logprobs=True)
        alone = self.prefill.run(f"alone{self._number}", prompt, count, logprobs=True)
        assert (handed.why, handed.tokens) == ("length", alone.tokens), len(prompt)
        apart = [abs(one - other) for one, other in zip(handed.logprobs, alone.logprobs, strict=True)]
        assert len(apart) == count
        assert all(each <= within for each in apart), f"{len(prompt)} tokens: {apart}"  # NaN is not, either
        return handed

    def alone(self, prompt: Sequence[int], count: int = 8) -> list[int]:
        """The tokens of one engine alone. Prefill serves as it."""
        self._number += 1
        return self.prefill.run(f"alone{self._number}", prompt, count).tokens

    def check_several(self, prompts: Sequence[Sequence[int]], count: int = 6) -> None:
        """Hand these at once: their tokens are those of one engine."""
        names = [f"several{self._number}.{place}" for place in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.prefill.add(name, prompt, 1, dict(PREFILL))
        for name, prompt in zip(names, prompts, strict=True):
            self.decode.add(name, prompt, count, self.prefill.result(name).params)
        answers = [self.decode.result(name).tokens for name in names]
        assert answers == [self.alone(prompt, count) for prompt in prompts]

    def moved(self) -> tuple[int, int]:
        """Requests whose state has come to decode so far, and their bytes."""
        said = self.decode.ask()
        nbytes = said["bytes"].get("decode", {})
        return (
            said["rooms"].get("decode", {}).get("succeeded", 0),
            sum(count for by_transport in nbytes.values() for count in by_transport.values()),
        )

    def settled(self) -> None:
        """Check that every block of both engines is free again."""
        for engine in (self.prefill, self.decode):
            assert engine.settle() == engine.free, engine.name
