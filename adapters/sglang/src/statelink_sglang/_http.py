"""HTTP exchanges with prefill: with its bootstrap server, and with the server that takes requests.

They block, so no scheduler's thread calls them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ._server import MAX_ANSWER, PATH, ROOMS_PATH, SCHEMA

__all__ = ["Found", "ask", "ask_ranks", "generate", "put", "put_rooms"]


class Found(NamedTuple):
    """What a bootstrap server knows of its prefill server.

    Attributes:
        instances: For each DP rank, the instance's name, and where its ranks' links listen.
        http_port: Where the server takes requests.
        follows: Whether a room alone says which DP rank has its request.
    """

    instances: tuple[tuple[str, tuple[str, ...]], ...]
    http_port: int
    follows: bool = True

    @classmethod
    def read(cls, content: dict[str, Any]) -> Found:
        """Read a server's answer.

        Raises:
            ValueError: The answer has another version or other fields, or names no ranks.
        """
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"version {content['schema']!r:.80} of its answers, not {SCHEMA}")
            instances = tuple(
                (str(each["instance"]), tuple(map(str, each["addresses"]))) for each in content["instances"]
            )
            port, follows = int(content["http_port"]), bool(content["follows"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"an answer of another kind ({type(error).__name__}: {error})") from error
        if not instances or not all(addresses for _, addresses in instances):
            raise ValueError("an answer without ranks")
        return cls(instances, port, follows)


def put(address: str, row: dict[str, Any], timeout: float) -> None:
    """Tell the server at ``address`` (``host:port``) where a rank is.

    Raises:
        OSError: It does not answer.
        ValueError: It refuses.
    """
    status, content = _exchange(address, "PUT", PATH, row, timeout)
    if status != 200:
        raise ValueError(f"the bootstrap server at {address} answered {status}: {content.get('error', '')}")


def ask(address: str, timeout: float) -> Found:
    """What the server at ``address`` (``host:port``) knows of prefill's ranks.

    Raises:
        OSError: It does not answer.
        ValueError: It is another server, or not all ranks have told it where they are.
    """
    status, content = _exchange(address, "GET", PATH, None, timeout)
    if status == 503 and "missing" in content:
        raise ValueError(f"prefill at {address} is starting: {content['missing']!s:.80} are missing")
    try:
        if status != 200:
            raise ValueError(f"HTTP status {status}")
        return Found.read(content)
    except ValueError as error:
        raise ValueError(
            f"no prefill server of the same statelink-sglang answers at {address}: {error}; "
            "it must be started with --disaggregation-transfer-backend statelink, too"
        ) from error


def put_rooms(address: str, dp_rank: int, rooms: Sequence[int], timeout: float) -> None:
    """Tell the server at ``address`` (``host:port``) which rooms a DP rank of prefill has.

    Args:
        address: The server's.
        dp_rank: The rank.
        rooms: At most `MOST_ROOMS`.
        timeout: Seconds for the answer.

    Raises:
        OSError: It does not answer.
        ValueError: It refuses.
    """
    body = {"schema": SCHEMA, "dp_rank": dp_rank, "rooms": list(rooms)}
    status, content = _exchange(address, "PUT", ROOMS_PATH, body, timeout)
    if status != 200:
        raise ValueError(f"the bootstrap server at {address} answered {status}: {content.get('error', '')}")


def ask_ranks(address: str, rooms: Sequence[int], timeout: float) -> dict[int, int]:
    """The DP ranks that have rooms, as far as the server at ``address`` (``host:port``) knows them.

    Args:
        address: The server's.
        rooms: At most `MOST_ROOMS`.
        timeout: Seconds for the answer.

    Raises:
        OSError: It does not answer.
        ValueError: It refuses, or answers something else.
    """
    status, content = _exchange(address, "POST", ROOMS_PATH, {"schema": SCHEMA, "rooms": list(rooms)}, timeout)
    if status != 200:
        raise ValueError(f"the bootstrap server at {address} answered {status}: {content.get('error', '')}")
    try:
        return {int(room): int(rank) for room, rank in content["ranks"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the bootstrap server at {address} gave an answer of another kind") from error


def generate(address: str, payload: dict[str, Any], timeout: float) -> None:
    """Have the server at ``address`` (``host:port``) compute a request.

    Raises:
        OSError: It does not answer.
        ValueError: It refuses.
    """
    status, content = _exchange(address, "POST", "/generate", payload, timeout)
    if status >= 400:
        raise ValueError(f"the server at {address} answered {status}: {json.dumps(content):.300}")


def _exchange(address: str, method: str, path: str, body: Any, timeout: float) -> tuple[int, dict[str, Any]]:
    """One exchange, of about ``timeout`` seconds at most. A request may name any server, so none is trusted."""
    end = time.monotonic() + timeout
    try:
        connection = http.client.HTTPConnection(address, timeout=timeout)
        connection.connect()
    except http.client.HTTPException as error:
        raise ValueError(f"{address} is no address of a server: {error}") from error
    # The socket's own limit begins again with each byte.
    watch = threading.Timer(end - time.monotonic(), _cut, (connection.sock,))
    watch.daemon = True
    watch.start()
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        raw = answer.read(MAX_ANSWER)
    except http.client.HTTPException as error:
        raise ValueError(f"no server of this kind answers at {address}: {type(error).__name__}") from error
    finally:
        watch.cancel()
        connection.close()
    if time.monotonic() >= end:
        raise TimeoutError(f"no whole answer in {timeout:g} s")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):  # the latter if the JSON is nested too deeply
        content = {}
    return answer.status, content if isinstance(content, dict) else {}


def _cut(sock: socket.socket) -> None:
    """End a connection, so that who reads from it goes on. On the thread of a timer."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
