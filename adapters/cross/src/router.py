"""A router between engines of two kinds: SGLang's prefill before vLLM's decode, or the other way.

Each engine gets the request in its own words. Statelink's room id and the addresses of prefill's links are in both.

    python adapters/cross/src/router.py sglang-to-vllm --prefill 127.0.0.1:30000 --bootstrap 127.0.0.1:8998 \
      --decode 127.0.0.1:8200 --model MODEL
    python adapters/cross/src/router.py vllm-to-sglang --prefill 127.0.0.1:8100 --decode 127.0.0.1:30001 --model MODEL

It listens at ``--listen`` (``127.0.0.1:9000``). ``POST /generate`` takes ``{"prompt": [token ids], "max_tokens": n}``.
The answer is ``{"token_ids": [...]}``, each token the most likely one. It is made to be read, and for tests: it has no
queue, no streams and no authentication.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

__all__ = ["FIRST_TOKEN", "RouteError", "SglangToVllm", "VllmToSglang", "ask", "complete", "generate", "serve"]

DIRECTORY = "/statelink"
"""Where SGLang's decode asks the bootstrap server for the links of prefill's ranks."""
SCHEMA = 2
"""Version of the answers that SGLang's decode takes."""
FIRST_TOKEN = "statelink_first_token"
SECONDS = 300.0
MOST_BYTES = 16 << 20
"""Most bytes of a request, and of an answer."""


class RouteError(Exception):
    """An engine did not serve a request. The text has its answer."""


class Instance(NamedTuple):
    """A prefill instance: its name, and where its ranks' links listen."""

    name: str
    addresses: tuple[str, ...]


class SglangToVllm:
    """Prefill on SGLang, decode on vLLM. Both get a request at once. Thread-safe.

    vLLM computes the last token of the prompt again, and samples from it. So nobody needs prefill's first token.

    Args:
        prefill: Host and port of SGLang's prefill server.
        bootstrap: Host and port of its bootstrap server.
        decode: Host and port of vLLM's decode server.
        model: The model's name on vLLM.
    """

    def __init__(self, prefill: str, bootstrap: str, decode: str, model: str) -> None:
        self._prefill, self._bootstrap, self._decode, self._model = prefill, bootstrap, decode, model

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens after a prompt. Blocks.

        Raises:
            RouteError: An engine refused it, or is not there.
        """
        room = secrets.randbelow((1 << 63) - 1) + 1
        instances = ask(self._bootstrap, "GET", DIRECTORY)["instances"]
        instance = instances[room % len(instances)]  # as SGLang chooses its DP rank
        host, _, port = self._bootstrap.rpartition(":")
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "room": str(room),
            "peer": instance["addresses"],
            "remote_engine_id": instance["instance"],
        }
        with ThreadPoolExecutor(1) as other:
            first = other.submit(generate, self._prefill, prompt, 1, host, int(port), room)
            answer = complete(self._decode, self._model, prompt, count, params)
            first.result()
        return answer.tokens


class VllmToSglang:
    """Prefill on vLLM, decode on SGLang, one after the other. Thread-safe.

    SGLang's decode does not compute the last token of the prompt. The first output token comes with the request. Decode
    asks this router where prefill's links are, as it would ask SGLang's bootstrap server.

    Args:
        prefill: Host and port of vLLM's prefill server.
        decode: Host and port of SGLang's decode server.
        model: The model's name on vLLM.
        here: Host and port where this router listens.
    """

    def __init__(self, prefill: str, decode: str, model: str, here: str) -> None:
        self._prefill, self._decode, self._model, self._here = prefill, decode, model, here
        self._lock = threading.Lock()
        self._instance: Instance | None = None

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens after a prompt. Blocks.

        Raises:
            RouteError: An engine refused it, or is not there.
        """
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = complete(self._prefill, self._model, prompt, 1, asked)
        given = first.params or {}
        if not given.get("do_remote_prefill"):
            raise RouteError(f"{self._prefill} has nothing to hand over: {given.get('refused', 'it does not say why')}")
        with self._lock:
            self._instance = Instance(given["remote_engine_id"], tuple(given["peer"]))
        host, _, port = self._here.rpartition(":")
        named = {FIRST_TOKEN: first.tokens[0]}
        return generate(self._decode, prompt, count, host, int(port), int(given["room"]), custom_params=named)

    def directory(self) -> tuple[int, dict[str, Any]]:
        """What SGLang's bootstrap server would answer: HTTP status and content."""
        with self._lock:
            instance = self._instance
        if instance is None:
            return 503, {"schema": SCHEMA, "missing": "all ranks"}
        listed = {"instance": instance.name, "addresses": list(instance.addresses)}
        return 200, {"schema": SCHEMA, "http_port": 0, "follows": True, "instances": [listed]}


class Completion(NamedTuple):
    """vLLM's answer: the tokens, and what it says to routers."""

    tokens: list[int]
    params: dict[str, Any] | None


def complete(where: str, model: str, prompt: Sequence[int], count: int, params: dict[str, Any]) -> Completion:
    """Have the vLLM server at ``where`` (``host:port``) complete a prompt. Blocks.

    Raises:
        RouteError: It refuses, or is not there.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }
    answer = ask(where, "POST", "/v1/completions", body)
    return Completion(answer["choices"][0]["token_ids"], answer.get("kv_transfer_params"))


def generate(
    where: str, prompt: Sequence[int], count: int, host: str, port: int, room: int, **sampling: Any
) -> list[int]:
    """Have the SGLang server at ``where`` (``host:port``) generate after a prompt. Blocks.

    Args:
        where: The server.
        prompt: Token ids.
        count: Tokens to generate.
        host: Host of the bootstrap server.
        port: Its port.
        room: Statelink's id of the request, which is SGLang's ``bootstrap_room``.
        sampling: Further sampling parameters.

    Raises:
        RouteError: It refuses, or is not there.
    """
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **sampling},
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": room,
    }
    tokens: list[int] = ask(where, "POST", "/generate", body)["output_ids"]
    return tokens


def ask(where: str, method: str, path: str, body: Any = None) -> Any:
    """One HTTP exchange with a server, in JSON. Blocks.

    Raises:
        RouteError: It answers with another status than 200, or does not answer.
    """
    connection = http.client.HTTPConnection(where, timeout=SECONDS)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise RouteError(f"{where}{path} does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise RouteError(f"{where}{path} answered {answer.status}: {raw.decode(errors='replace')[:500]}")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # cut after `MOST_BYTES`, no JSON, or nested too deeply
        raise RouteError(f"{where}{path} answered something else: {error}") from error


class Listener(ThreadingHTTPServer):
    """The router's own server. Threads of requests end with the process."""

    daemon_threads = True
    request_queue_size = 128


def serve(listen: tuple[str, int], make: Callable[[str], SglangToVllm | VllmToSglang]) -> Listener:
    """A server that listens, and is to be run with ``serve_forever``.

    Args:
        listen: Host and port; port 0 for any.
        make: Makes the router, from the host and port where the server listens.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == DIRECTORY and isinstance(router, VllmToSglang):
                self._answer(*router.directory())
            else:
                self._answer(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", "-1"))
                if not 0 <= length <= MOST_BYTES:
                    raise ValueError(f"a body of {length} bytes")
                given = json.loads(self.rfile.read(length))
                prompt, count = given["prompt"], given["max_tokens"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self.close_connection = True
                self._answer(400, {"error": f"no request: {error}"})
                return
            try:
                tokens = router.generate(prompt, count)
            except RouteError as error:
                self._answer(502, {"error": str(error)})
            else:
                self._answer(200, {"token_ids": tokens})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because SGLang's decode asks every second where prefill is."""

    server = Listener(listen, Handler)
    host, port = server.server_address[:2]
    router = make(f"{host!s}:{port}")
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description="Route requests between SGLang and vLLM servers.")
    parser.add_argument("way", choices=["sglang-to-vllm", "vllm-to-sglang"])
    parser.add_argument("--prefill", required=True, help="host:port of the prefill server")
    parser.add_argument("--decode", required=True, help="host:port of the decode server")
    parser.add_argument("--bootstrap", help="host:port of SGLang's bootstrap server, for sglang-to-vllm")
    parser.add_argument("--model", required=True, help="the model's name on the vLLM server")
    parser.add_argument("--listen", default="127.0.0.1:9000", help="where to listen (%(default)s)")
    given = parser.parse_args()
    if given.way == "sglang-to-vllm" and not given.bootstrap:
        parser.error("sglang-to-vllm needs --bootstrap")

    def make(here: str) -> SglangToVllm | VllmToSglang:
        if given.way == "sglang-to-vllm":
            return SglangToVllm(given.prefill, given.bootstrap, given.decode, given.model)
        return VllmToSglang(given.prefill, given.decode, given.model, here)

    host, _, port = given.listen.rpartition(":")
    serve((host, int(port)), make).serve_forever()


if __name__ == "__main__":
    main()
