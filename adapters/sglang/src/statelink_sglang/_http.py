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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ._offer_table import NEWS_PATH, OFFERS_PATH, Known
from ._proofs import KeyPair, key_in
from ._server import KEY_HEADER, MAX_ANSWER, PATH, PROOF_HEADER, ROOMS_PATH, SCHEMA, Row

__all__ = ["Bootstrap", "Found", "ask", "ask_ranks", "generate"]

MOST_SHOWN = 300
"""Most characters of another server's text in one of ours."""


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
        if content.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(f"version {_shown(content['schema']):.80} of its answers, not {SCHEMA}")
        port, follows, listed = (content.get(key) for key in ("http_port", "follows", "instances"))
        if type(port) is not int or type(follows) is not bool or type(listed) is not list:
            raise ValueError("an answer of another kind")
        if not listed:
            raise ValueError("an answer without ranks")
        return cls(tuple(map(_instance, listed)), port, follows)


def _instance(given: Any) -> tuple[str, tuple[str, ...]]:
    """The name of an instance, and the addresses of its ranks, as a bootstrap server lists them.

    Raises:
        ValueError: They are something else, or there is no address.
    """
    name, addresses = (given.get(key) for key in ("instance", "addresses")) if type(given) is dict else (None, None)
    if type(name) is not str or type(addresses) is not list or not all(type(each) is str for each in addresses):
        raise ValueError("an answer of another kind")
    if not addresses:
        raise ValueError("an answer without ranks")
    return name, tuple(addresses)


class Bootstrap:
    """The bootstrap server of prefill, for a rank that puts something there. Belongs to one thread.

    Args:
        address: The server's, ``host:port``.
        pair: The rank's keys.
    """

    def __init__(self, address: str, pair: KeyPair) -> None:
        self.address = address
        self._pair = pair
        self._server = ""
        """The public key of the server, which draws one with each start; empty until it is known."""

    def put(self, row: Row, timeout: float) -> None:
        """Tell the server where a rank is.

        Args:
            row: The rank.
            timeout: Seconds for an answer. If the server was started anew, there are two.

        Raises:
            OSError: It does not answer.
            ValueError: It refuses, or answers something else.
        """
        self._put(PATH, row._asdict(), timeout)

    def put_rooms(self, dp_rank: int, rooms: Sequence[int], timeout: float) -> None:
        """Tell the server which rooms a DP rank of prefill has.

        Args:
            dp_rank: The rank.
            rooms: At most `MOST_ROOMS`.
            timeout: As for `put`.

        Raises:
            OSError: It does not answer.
            ValueError: It refuses, or answers something else.
        """
        self._put(ROOMS_PATH, {"schema": SCHEMA, "dp_rank": dp_rank, "rooms": list(rooms)}, timeout)

    def put_offers(self, content: dict[str, Any], timeout: float) -> str:
        """Tell the server what a decode server offers. Returns the name of the table that has taken it.

        Args:
            content: What an `OfferTable` takes.
            timeout: As for `put`.

        Raises:
            OSError: It does not answer.
            ValueError: It refuses, or answers something else.
        """
        return str(self._put(OFFERS_PATH, {"schema": SCHEMA, **content}, timeout).get("name", ""))

    def news(self, known: Known, timeout: float) -> dict[str, Any]:
        """What decode servers offer, as the server knows it: see `OfferTable.news`.

        Args:
            known: What this rank knows.
            timeout: Seconds for an answer, beside those for which the server may wait.

        Raises:
            OSError: It does not answer.
            ValueError: It refuses, or answers something else.
        """
        answer = self._put(NEWS_PATH, {"schema": SCHEMA, **known._asdict()}, known.seconds + timeout)
        if not {"name", "version", "servers", "offers"} <= {*answer}:
            raise ValueError(f"the bootstrap server at {self.address} gave an answer of another kind")
        return answer

    def _put(self, path: str, content: dict[str, Any], timeout: float) -> dict[str, Any]:
        body = _body(content)
        for last in (False, True):
            proof = self._pair.prove(self._server, path, body) if self._server else ""
            headers = {KEY_HEADER: self._pair.public, PROOF_HEADER: proof}
            status, answer = _exchange(self.address, "PUT", path, body, timeout, headers)
            if status == 200:
                return answer
            key = answer.get("key")
            if last or status != 401 or type(key) is not str:
                raise _refusal(self.address, status, answer)
            self._server = key
        raise AssertionError("the last answer was looked at")


def ask(address: str, timeout: float, allow: frozenset[str] | None = None) -> Found:
    """What the server at ``address`` (``host:port``) knows of prefill's ranks.

    Args:
        address: The server's.
        timeout: Seconds for the answer.
        allow: Public keys that the ranks' links may have; ``None`` if they may have none.

    Raises:
        OSError: It does not answer.
        ValueError: It is another server, not all ranks have told it where they are, or a rank has another key.
    """
    status, content = _exchange(address, "GET", PATH, None, timeout)
    if status == 503 and "missing" in content:
        raise ValueError(f"prefill at {address} is starting: {_shown(content['missing']):.80} are missing")
    try:
        if status != 200:
            raise ValueError(f"HTTP status {status}")
        found = Found.read(content)
    except ValueError as error:
        raise ValueError(
            f"no prefill server of the same statelink-sglang answers at {address}: {error}; "
            "it must be started with --disaggregation-transfer-backend statelink, too"
        ) from error
    for rank in (each for _, addresses in found.instances for each in addresses):
        _check_key(rank, allow)
    return found


def _check_key(rank: str, allow: frozenset[str] | None) -> None:
    """Refuse a rank of prefill to whose link this server's link would not speak."""
    key, link = key_in(rank), rank.partition("@")[0]
    if bool(key) != (allow is not None):
        raise ValueError(
            f"the link of prefill's rank at {link:.80} has {'keys' if key else 'no keys'}, and this server's link has "
            f"{'none' if key else 'some'}: configure 'keys' on both servers, or on neither"
        )
    if allow is not None and key not in allow:
        raise ValueError(
            f"the link of prefill's rank at {link:.80} has the key {key}, which this server does not allow: add it to "
            "'allow' of 'keys'"
        )


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
    status, content = _exchange(address, "POST", ROOMS_PATH, _body({"schema": SCHEMA, "rooms": list(rooms)}), timeout)
    if status != 200:
        raise _refusal(address, status, content)
    ranks, asked = content.get("ranks"), {str(room): room for room in rooms}
    if type(ranks) is not dict or not all(type(rank) is int for rank in ranks.values()):
        raise ValueError(f"the bootstrap server at {address} gave an answer of another kind")
    return {asked[room]: rank for room, rank in ranks.items() if room in asked}


def generate(address: str, payload: dict[str, Any], timeout: float) -> None:
    """Have the server at ``address`` (``host:port``) compute a request.

    Raises:
        OSError: It does not answer.
        ValueError: It refuses.
    """
    status, content = _exchange(address, "POST", "/generate", _body(payload), timeout)
    if status >= 400:
        raise ValueError(f"the server at {address} answered {status}: {_shown(content)}")


def _body(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _refusal(address: str, status: int, content: dict[str, Any]) -> ValueError:
    return ValueError(f"the bootstrap server at {address} answered {status}: {_shown(content.get('error', ''))}")


def _shown(given: Any) -> str:
    """What another server said, with escapes for characters that a log or an answer may not take."""
    try:
        shown = json.dumps(given)
    except RecursionError:
        return "something that is nested too deeply"
    return (shown[1:-1] if type(given) is str else shown)[:MOST_SHOWN]


def _exchange(
    address: str, method: str, path: str, body: bytes | None, timeout: float, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """One exchange, of about ``timeout`` seconds at most. A request may name any server, so none is trusted."""
    end = time.monotonic() + timeout
    try:
        connection = http.client.HTTPConnection(address, timeout=timeout)
        connection.connect()
    except (http.client.HTTPException, OverflowError) as error:
        raise ValueError(f"{address} is no address of a server: {error}") from error
    # The socket's own limit begins again with each byte.
    watch = threading.Timer(end - time.monotonic(), _cut, (connection.sock,))
    watch.daemon = True
    watch.start()
    try:
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, body, {**kind, **(headers or {})})
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
