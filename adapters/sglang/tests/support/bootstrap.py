"""What ranks of prefill say to a bootstrap server, and servers that answer anything, over real HTTP."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from statelink_sglang.backend import SCHEMA, Bootstrap, BootstrapServer, KeyPair, Row

FOR_EVER = 600.0
"""A lifetime of ranks that no test outlasts."""
OURS = KeyPair()
"""Those of the ranks that a test starts with."""


def at(server: BootstrapServer) -> str:
    return f"127.0.0.1:{server.port}"


def row(rank: int, ranks: int = 2, instance: str = "first", dp: tuple[int, int] = (0, 1), **more: Any) -> Row:
    address = f"tcp://127.0.0.1:{7000 + 10 * dp[0] + rank}"
    return Row(SCHEMA, instance, rank, ranks, address, *dp, follows=True, http_port=30000)._replace(**more)


def put(server: BootstrapServer, given: Row, pair: KeyPair = OURS) -> None:
    """Register a rank."""
    Bootstrap(at(server), pair).put(given, 30)


def send(server: BootstrapServer, method: str, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Any request. Returns the status and the answer."""
    connection = http.client.HTTPConnection(at(server), timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextlib.contextmanager
def answering(answer: Callable[[str, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """A server whose answers, a status and a body, a function makes of the path and the body. Gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def wait(condition: Callable[[], Any]) -> Any:
    """What the condition returns, once it is neither ``None`` nor false nor empty; 0 counts."""
    until = time.monotonic() + 60
    while not (found := condition()) and (found is None or found is False or found == ""):
        assert time.monotonic() < until
        time.sleep(0.005)
    return found
