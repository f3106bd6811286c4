"""The server under SGLang's bootstrap port: decode asks it where prefill's ranks are.

It runs in the main process of prefill. Its threads only read and write a small table. Decode's requests name the host
and the port, because SGLang's routers put them there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, get_type_hints

from statelink.backend import close_in_children

__all__ = ["MOST_ROOMS", "PATH", "ROOMS_PATH", "SCHEMA", "BootstrapServer", "Row"]

log = logging.getLogger("statelink.sglang")

PATH = "/statelink"
"""Ranks put themselves here, and decode gets the instances from here."""

ROOMS_PATH = "/statelink/rooms"
"""DP ranks of prefill put the rooms that they have here, and decode posts the rooms that it looks for."""

SCHEMA = 2
"""Version of the rows and of the answers. Both sides must have the same one; any other is refused."""

MAX_BODY = 1 << 16
"""Most bytes of a row."""
MAX_RANKS = 4096
"""Most ranks of all DP ranks together."""
MOST_ROOMS = 2000
"""Most rooms in one message. Each has at most 20 characters."""
KEPT_ROOMS = 1 << 18
"""Rooms whose DP ranks are kept. The oldest one goes first: decode has asked for it long ago, or never will."""
MAX_ANSWER = 4 << 20
"""Most bytes of an answer: 1 KiB for each rank."""
MAX_NAME = 512
"""Most characters of an instance's name, and of an address."""
TIMEOUT = 10.0


class Row(NamedTuple):
    """What a rank of prefill says of itself.

    Attributes:
        schema: `SCHEMA`.
        instance: The instance's name. Each DP rank is one, and a restarted server has other ones.
        rank: This rank's number in the instance.
        ranks: Ranks of the instance.
        address: Where its link listens.
        dp_rank: Which of the server's DP ranks the instance is.
        dp_size: DP ranks of the server.
        follows: Whether the room of a request alone says which DP rank has it. Otherwise, decode has to ask.
        http_port: Where the server takes requests.
    """

    schema: int
    instance: str
    rank: int
    ranks: int
    address: str
    dp_rank: int
    dp_size: int
    follows: bool
    http_port: int

    @classmethod
    def read(cls, given: Any) -> Row:
        """A row from decoded JSON.

        Raises:
            ValueError: The JSON is not a row.
        """
        if not isinstance(given, dict) or not isinstance(given.get("schema"), int):
            raise ValueError(f"a rank is described by {', '.join(cls._fields)}")
        if given["schema"] != SCHEMA:
            raise ValueError(f"the rank speaks version {given['schema']}, this server version {SCHEMA}")
        if set(given) != set(cls._fields):
            raise ValueError(f"a rank is described by {', '.join(cls._fields)}")
        row = cls(**given)
        if not all(type(value) is kind for value, kind in zip(row, get_type_hints(cls).values(), strict=True)):
            raise ValueError("a value has the wrong type")
        for number, count in ((row.rank, row.ranks), (row.dp_rank, row.dp_size)):
            if not 0 <= number < count <= MAX_RANKS:
                raise ValueError(f"rank {number} of {count}")
        if row.ranks * row.dp_size > MAX_RANKS:
            raise ValueError(f"{row.dp_size} instances of {row.ranks} ranks; at most {MAX_RANKS} ranks are listed")
        if max(len(row.instance), len(row.address)) > MAX_NAME:
            raise ValueError(f"a name or an address is longer than {MAX_NAME} characters")
        return row


class _Ranks:
    """The rows of prefill's ranks. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, dict[int, Row]] = {}
        """By DP rank, and then by rank."""

    def put(self, row: Row) -> None:
        with self._lock:
            instance = self._rows.setdefault(row.dp_rank, {})
            if any((each.instance, each.ranks) != (row.instance, row.ranks) for each in instance.values()):
                instance.clear()  # the server was restarted, and these are its old ranks
            if any(each.dp_size != row.dp_size for rows in self._rows.values() for each in rows.values()):
                self._rows = {row.dp_rank: instance}
            instance[row.rank] = row

    def get(self) -> dict[str, Any]:
        with self._lock:
            instances = {number: dict(rows) for number, rows in self._rows.items() if rows}
        some = next((row for rows in instances.values() for row in rows.values()), None)
        if some is None:
            return {"schema": SCHEMA, "missing": "all ranks"}
        ranks, found = some.ranks * some.dp_size, sum(map(len, instances.values()))
        if found < ranks:
            return {"schema": SCHEMA, "missing": f"{ranks - found} of {ranks}"}
        listed = [
            {"instance": rows[0].instance, "addresses": [rows[rank].address for rank in range(rows[0].ranks)]}
            for _, rows in sorted(instances.items())
        ]
        return {
            "schema": SCHEMA,
            "http_port": some.http_port,
            "follows": all(row.follows for rows in instances.values() for row in rows.values()),
            "instances": listed,
        }


class _Rooms:
    """Which DP rank has which room. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, int] = {}
        """The room that was put last is the last one."""

    def put(self, given: Any) -> None:
        """Note the rooms of a DP rank.

        Raises:
            ValueError: The JSON does not say which.
        """
        rank, rooms = _rooms_of(given, "dp_rank"), _rooms_of(given, "rooms")
        if type(rank) is not int or not 0 <= rank < MAX_RANKS:
            raise ValueError(f"DP rank {rank!r:.80}")
        with self._lock:
            for room in rooms:
                self._ranks.pop(room, None)
                self._ranks[room] = rank
            for room in list(itertools.islice(self._ranks, max(0, len(self._ranks) - KEPT_ROOMS))):
                del self._ranks[room]

    def ranks(self, given: Any) -> dict[str, Any]:
        """The DP ranks of the rooms that are asked for, as far as they are known.

        Raises:
            ValueError: The JSON does not say for which.
        """
        rooms = _rooms_of(given, "rooms")
        with self._lock:
            found = {str(room): self._ranks[room] for room in rooms if room in self._ranks}
        return {"schema": SCHEMA, "ranks": found}


def _rooms_of(given: Any, key: str) -> Any:
    if not isinstance(given, dict) or given.get("schema") != SCHEMA or key not in given:
        raise ValueError(f"version {SCHEMA} of this message has {key!r}")
    found = given[key]
    if key == "rooms" and (
        type(found) is not list or len(found) > MOST_ROOMS or not all(type(room) is int for room in found)
    ):
        raise ValueError(f"rooms are listed as numbers, at most {MOST_ROOMS} at once")
    return found


class BootstrapServer:
    """Listens under SGLang's bootstrap port until the process ends. SGLang keeps a reference and does nothing else.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        handler = type("_Handler", (_Handler,), {"ranks": _Ranks(), "rooms": _Rooms()})
        listener = _Listener6 if ":" in host else _Listener
        try:
            self._server = listener((host, port), handler)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the bootstrap server of the transfer backend 'statelink' cannot listen on {host}:{port}: "
                f"{error.strerror}; choose another --disaggregation-bootstrap-port",
            ) from error
        close_in_children(self._server.socket)
        self.host, self.port = self._server.server_address[:2]
        self._thread = threading.Thread(target=self._server.serve_forever, name="statelink-bootstrap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._server.shutdown()
        self._server.server_close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what ended a connection. Probes of load balancers reset theirs: only the debug log has that."""
        reset = isinstance(sys.exc_info()[1], OSError)
        log.log(logging.DEBUG if reset else logging.ERROR, "a connection from %s", client_address, exc_info=True)

    def server_bind(self) -> None:
        # The base class looks up the host's name, which may take seconds and is used nowhere.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Listener6(_Listener):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    ranks: _Ranks
    rooms: _Rooms
    timeout = TIMEOUT
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        """A rank says where it is, or which rooms it has."""
        takers = {PATH: lambda given: self.ranks.put(Row.read(given)), ROOMS_PATH: self.rooms.put}
        self._take(takers.get(self.path))

    def do_POST(self) -> None:
        """Decode asks which DP ranks have rooms."""
        self._take(self.rooms.ranks if self.path == ROOMS_PATH else None)

    def _take(self, taker: Callable[[Any], dict[str, Any] | None] | None) -> None:
        """Answer a request that has a body of JSON."""
        if taker is None:
            self._answer(404, {"error": f"no such path: {self.path:.80}"})
            return
        try:
            length = int(self.headers.get("Content-Length", "-1"))
            if not 0 <= length <= MAX_BODY:
                raise ValueError(f"a body of {length} bytes")
            answer = taker(json.loads(self.rfile.read(length)))
        except (ValueError, RecursionError) as error:  # the latter if the JSON is nested too deeply
            self.close_connection = True
            self._answer(400, {"error": str(error)})
            return
        self._answer(200, answer or {"schema": SCHEMA})

    def do_GET(self) -> None:
        """Decode asks where the ranks are; a probe asks whether this server lives."""
        if self.path == PATH:
            found = self.ranks.get()
            self._answer(200 if "instances" in found else 503, found)
        elif self.path == "/health":
            self._answer(200, {"schema": SCHEMA})
        else:
            self._answer(404, {"error": f"no such path: {self.path:.80}"})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Decode asks every second: only the debug log has it."""
        log.debug("%s: %s", self.address_string(), format % args)
