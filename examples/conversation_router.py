"""A router for conversations over one prefill and one decode server of vLLM, both with the kv_role `kv_both`.

Run it: `python examples/conversation_router.py PREFILL DECODE PORT held|asked`, with servers as `host:port`. Clients
name their conversation in the header `X-Conversation`. They get completions, chat completions, and streams of both.
docs/conversations.md has the meaning of every field here. What it knows is in the memory of this one process.
"""

import http.client
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BOTH = {"do_remote_prefill": True, "do_remote_decode": True}


class Router(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, prefill: str, decode: str, port: int, mode: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.prefill, self.decode, self.asks = prefill, decode, mode == "asked"
        self.known: dict[str, Any] = {}
        """For each conversation, what decode said at the end of its last turn. Bound this where clients come and go."""


class Handler(BaseHTTPRequestHandler):
    server: Router

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body.pop("kv_transfer_params", None)  # a client's own could read the state of others
        conversation = self.headers.get("X-Conversation")
        history = self.history(conversation, body)
        # Prefill computes what is new, and drops its one token. With no parameters of the history, it computes all.
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {**history, "do_remote_decode": True}}
        for key in ("stream_options", "max_completion_tokens", "min_tokens"):
            first.pop(key, None)
        status, answer = post(self.server.prefill, self.path, first)
        if status != 200:
            return self.reply(status, answer)
        params = answer.get("kv_transfer_params") or {}
        if conversation and not self.server.asks:
            params = {**params, "do_remote_decode": True, "hold": True}
        response = request(self.server.decode, self.path, {**body, "kv_transfer_params": params})
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers["Content-Type"])
        self.end_headers()
        for line in response:
            self.wfile.write(line)
            for said in parameters(line):
                if conversation and said.get("tokens"):
                    self.server.known[conversation] = said

    def history(self, conversation: str | None, body: dict[str, Any]) -> dict[str, Any]:
        """What prefill has to know of the turns before; nothing in a first turn."""
        said = self.server.known.pop(conversation, None) if conversation else None
        if self.server.asks and conversation:
            ask = {**body, "max_tokens": 1, "stream": False}
            ask |= {"kv_transfer_params": {"do_remote_decode": True, "cached": True}}
            _, answer = post(self.server.decode, self.path, ask)
            said = answer.get("kv_transfer_params") or {}
        return {**said, **BOTH} if said and "refused" not in said else {}

    def reply(self, status: int, answer: Any) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


def request(server: str, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def post(server: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    response = request(server, path, body)
    return response.status, json.loads(response.read())


def parameters(line: bytes) -> Iterator[dict[str, Any]]:
    """The parameters in a line of an answer: the whole of one, or a part of a stream."""
    text = line.removeprefix(b"data: ").strip()
    if text.startswith(b"{") and b'"kv_transfer_params"' in text:
        found = json.loads(text).get("kv_transfer_params")
        if found:
            yield found


if __name__ == "__main__":
    prefill, decode, port, mode = sys.argv[1:]
    Router(prefill, decode, int(port), mode).serve_forever()
