"""Real servers of SGLang in two network namespaces, for what is left of a transfer after the forward pass."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_processes import running
from support.connectors import TCP_LIMITS
from support.forks import INSTALLED
from support.models import VOCABULARY, make_llama
from support.servers import Pair, Posted, Server

from benchmarks import after_forward
from benchmarks.after_forward import Prompts, Turn, Way, most_tokens
from benchmarks.namespaces import SPACES, enter, namespaces

from . import watched

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

__all__ = ["Apart", "report"]

LAYERS, HEADS, DIM = 8, 8, 64
TOKEN = LAYERS * HEADS * 2 * DIM * 4
"""Bytes of a token's state in the model: key and value, numbers of four bytes."""
PAGE = 16


def _make_wide(folder: Path) -> Path:
    """Much state for each token, and little to compute."""
    made: Path = make_llama(folder, 16384, LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=DIM)
    return made


class _Apart(Server):  # type: ignore[misc]
    """A server in the namespace of its role, which this process asks from there."""

    def __init__(self, role: str, folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.host = SPACES[role][1]
        self._inside = ThreadPoolExecutor(2, initializer=enter, initargs=(role,))
        super().__init__(role, folder, arguments, environment)

    def ask(self, *given: Any, **more: Any) -> Any:
        return self._inside.submit(super().ask, *given, **more).result()


class Apart(Pair):  # type: ignore[misc]
    """A prefill and a decode server with one connector.

    Args:
        connector: ``statelink``, ``nixl`` or ``mooncake``.
        backend: Of Statelink.
        model: The folder of a model.
        folder: For logs and notes.
        most: Tokens of the largest step.
        interval: Statelink's option `switch_interval`, if one is given.
    """

    def __init__(
        self, connector: str, backend: str, model: Path, folder: Path, most: int, interval: float | None
    ) -> None:
        folder.mkdir(parents=True)
        (folder / watched.COUNT).write_text("1")
        most = -(-most // PAGE) * PAGE + 1024  # decode's tokens begin pages of their own
        common = ["--page-size", str(PAGE), "--max-total-tokens", str(2 * most), "--chunked-prefill-size", str(most)]
        common += ["--max-running-requests", "64", "--disable-radix-cache", "--num-reserved-decode-tokens", "4"]
        own = ["--disaggregation-transfer-backend", connector]
        # Whoever stands still is not lost.
        config: dict[str, Any] = {"backend": backend, "liveness": 600.0, "insecure": True}
        if interval is not None:
            config["switch_interval"] = interval
        if backend == "tcp":
            config["options"] = {"same_host_copy": False}
        # To UCX, both namespaces are one host, where it needs no network.
        environment = {INSTALLED: watched.__name__, watched.FOLDER: str(folder), "UCX_TLS": "^sm"}
        environment |= TCP_LIMITS if connector == "mooncake" else {}
        super().__init__(folder, model, config, common=common, prefill=own, decode=own, environment=environment)

    def start(self, role: str, name: str = "", *more: str, port: int = 0) -> Server:
        address = SPACES[role][1]
        config = json.loads(self._environment["STATELINK_SGLANG_CONFIG"]) | {"listen": f"tcp://{address}:0"}
        own = {"STATELINK_SGLANG_CONFIG": json.dumps(config), "SGLANG_HOST_IP": address, watched.ROLE: role}
        return _Apart(role, self._folder, self._arguments[role], self._environment | own)

    def go_on(self) -> None:
        for server in (self.prefill, self.decode):
            server.go_on()

    def rest(self) -> None:
        for server in (self.prefill, self.decode):
            server.stop()

    def turn(self, prompts: Prompts, *, whole: bool = False) -> Turn:
        """One step, as a router gives it to both servers at once. With ``whole``, no layer leaves before its end."""
        mark = self._folder / watched.WHOLE
        mark.touch() if whole else mark.unlink(missing_ok=True)
        (self._folder / watched.COUNT).write_text(str(len(prompts)))
        for role in SPACES:
            (self._folder / role).write_text("")
        body = self.body([], 2, bootstrap_host=SPACES["prefill"][1], input_ids=[list(each) for each in prompts])
        self.go_on()
        second, first = Posted(self.decode, body), Posted(self.prefill, body)
        answers = second.answer(), first.answer()
        self.rest()
        if any(each.status != 200 for each in answers):
            raise AssertionError(f"a request failed: {answers}\n{self.decode.logged()[-6000:]}")
        passes, arrived = (
            [json.loads(line) for line in (self._folder / role).read_text().splitlines()] for role in SPACES
        )
        if len(arrived) != len(prompts):
            raise AssertionError(f"the state of {len(arrived)} of {len(prompts)} requests has arrived")
        ((began, ended),) = passes
        left = max(at for (at,) in arrived) - ended
        return Turn(left, ended - began, [each["output_ids"] for each in answers[0].body])


def report(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure Statelink over each backend that ``--against`` names, and each of SGLang's connectors."""
    both = [each.partition(":") for each in arguments.against]
    logs, model = arguments.out / "sglang-logs-apart", _make_wide(folder / "wide")
    shutil.rmtree(logs, ignore_errors=True)
    ways: dict[str, Way] = {}
    with namespaces(), contextlib.ExitStack() as stack:

        def pair(connector: str, backend: str) -> Apart:
            given = most_tokens(arguments), arguments.switch_interval
            made = Apart(connector, backend, model, logs / f"{connector}-{backend}", *given)
            stack.enter_context(running(made)).rest()
            return made

        for backend in dict.fromkeys(each for _, _, each in both):
            ours = pair("statelink", backend)
            ways |= {f"{backend}, layers": ours.turn, f"{backend}, at the end": partial(ours.turn, whole=True)}
        ways |= {f"SGLang's {connector}": pair(connector, "").turn for connector, _, _ in both}
        after_forward.report("sglang", arguments, ways, TOKEN, VOCABULARY)
