"""Routers: vLLM's own, a program of Rust, and what llm-d's sidecar sends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from engine_processes import HttpServer, free_port
from pages import commands

from .servers import Answer

if TYPE_CHECKING:
    from pathlib import Path

    from .servers import Server

__all__ = ["CHAT", "COMPLETIONS", "LIMITS", "Router", "Sidecar", "bootstrap_server"]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")


class Router(HttpServer[Answer]):
    """vLLM's own router (``vllm-router``) in front of servers, as docs/vllm.md starts it.

    Args:
        connector: Its ``--kv-connector``.
        folder: Where the log is.
        prefill: The prefill servers.
        decode: The decode server.
        options: Further options of its command line.
        bootstrap: The port of `bootstrap_server`, if it asks one.
        key: The key of the servers.
    """

    answers = Answer

    def __init__(
        self,
        connector: str,
        folder: Path,
        prefill: Sequence[Server],
        decode: Server,
        *options: str,
        bootstrap: int | None = None,
        key: str = "",
    ) -> None:
        (shown,) = (each for each in commands("vllm.md", "vllm-router") if connector in each)
        first, *others = (f"http://127.0.0.1:{each.port}" for each in prefill)
        here = {"8100": first, "8200": f"http://127.0.0.1:{decode.port}", "8998": str(bootstrap)}
        command = [
            *(sys.executable, "-W", "ignore", "-m", "vllm_router.launch_router"),
            *(here.get(word.rpartition(":")[2], word) for word in shown),
            *(word for other in others for word in ("--prefill", other)),
            *("--prometheus-port", str(free_port()), *options),
        ]
        self.model = decode.model
        super().__init__(f"router-{connector}-{prefill[0].name}", folder, command, {"OPENAI_API_KEY": key})


@contextlib.contextmanager
def bootstrap_server(folder: Path, name: str) -> Iterator[int]:
    """The web server of docs/llm-d.md, which answers ``GET /query`` with the name of a prefill server. Yields its port.

    Routers ask it in their mode for Mooncake.
    """
    (folder / "query").write_text(f'{{"0": {{"engine_id": "{name}"}}}}\n')
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield port
        finally:
            server.kill()


class TwoServers(Protocol):
    """What asks prefill, and then decode."""

    @property
    def prefill(self) -> Server: ...
    @property
    def decode(self) -> Server: ...


class Sidecar:
    """Beside decode: it has a request computed by prefill first. The client's own fields go to decode.

    Args:
        pair: A prefill server and a decode server.
        path: Where a client posts.
        lost: How many answers of prefill are lost on their way, such as by a gateway that answers 502 or 504.
    """

    def __init__(self, pair: TwoServers, path: str = COMPLETIONS, lost: int = 0) -> None:
        self._pair, self._path, self._lost = pair, path, lost

    def prefill(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Post to prefill, again after each answer that is lost: the same body under the same id."""
        asked = {
            **body,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
            "stream": False,
        }
        asked.pop("stream_options", None)
        if self._path == RESPONSES:
            asked["max_output_tokens"] = 1
        else:
            asked |= dict.fromkeys(LIMITS, 1)
        for attempt in range(self._lost + 1):
            answer = self._pair.prefill.ask(self._path, asked, headers=self.headers)
            assert answer.status == 200, (attempt, answer)
        params: dict[str, Any] | None = answer.body.get("kv_transfer_params")
        return params

    def post(self, body: Mapping[str, Any]) -> Answer:
        """The client's request: what decode answers."""
        self.headers = {"x-request-id": str(uuid.uuid1())}
        params = self.prefill(body)
        return self._pair.decode.ask(self._path, {**body, "kv_transfer_params": params}, headers=self.headers)
