"""The server under SGLang's bootstrap port: decode asks it where prefill's ranks are.

It runs in the main process of prefill. Its threads only read and write a small table. Decode's requests name the host
and the port, because SGLang's routers put them there.

Anybody may ask. Who puts something proves to hold a key. With keys in the configuration, that is the configured one, or
one that is allowed; without, it is any. What the holder of one key has put stays until the holder replaces it, or is
silent for some time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, get_type_hints

from statelink.backend import Tally, close_in_children

from ._offer_table import NEWS_PATH, OFFERS_PATH, Known, Offered, OfferTable
from ._options import read_options
from ._proofs import KeyPair, allowed, key_in

__all__ = [
    "KEY_HEADER",
    "LIFETIME_SECONDS",
    "MAX_ANSWER",
    "MOST_ROOMS",
    "PATH",
    "PROOF_HEADER",
    "ROOMS_PATH",
    "SCHEMA",
    "BootstrapServer",
    "Row",
]

log = logging.getLogger("statelink.sglang")

PATH = "/statelink"
"""Ranks put themselves here, and decode gets the instances from here."""

ROOMS_PATH = "/statelink/rooms"
"""DP ranks of prefill put the rooms that they have here, and decode posts the rooms that it looks for."""

SCHEMA = 2
"""Version of the rows and of the answers. Both sides must have the same one; any other is refused."""

KEY_HEADER, PROOF_HEADER = "Statelink-Key", "Statelink-Proof"
"""A message that puts something has the sender's public key, and the proof that the sender holds it."""

LIFETIME_SECONDS = 10.0
"""Seconds for which a rank is listed after it last registered: a little more than three of a rank's periods."""
SWEEP_SHARE = 0.1
"""Share of the lifetime that is between two searches for ranks that have been silent for too long."""

MAX_BODY = 1 << 16
"""Most bytes of a row."""
MAX_BODIES = {OFFERS_PATH: 1 << 20}
"""Most bytes of other messages, by path."""
MAX_RANKS = 4096
"""Most ranks of all DP ranks together."""
MOST_ROOMS = 2000
"""Most rooms in one message. Each has at most 20 characters."""
KEPT_ROOMS = 1 << 18
"""Rooms whose DP rank is kept, for all DP ranks together. Each has an equal share, of which the oldest room goes first:
decode has asked for it long ago, or never will."""
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


class _Rooms(NamedTuple):
    """What the first rank of a DP rank says of the requests that have come to it."""

    dp_rank: int
    rooms: list[int]

    @classmethod
    def read(cls, given: Any) -> _Rooms:
        """Rooms from decoded JSON.

        Raises:
            ValueError: The JSON does not say which, or of which DP rank.
        """
        rooms = _rooms_of(given)
        if type(number := given.get("dp_rank")) is not int or not 0 <= number < MAX_RANKS:
            raise ValueError("rooms are told with a DP rank")
        return cls(number, rooms)


_Told = Row | _Rooms | Offered | Known
"""What a rank says, with a proof that it holds its key."""


class _Refused(Exception):
    """The server refuses what it was told.

    Attributes:
        status: HTTP status.
        kind: Which refusals are counted and logged together.
    """

    def __init__(self, status: int, kind: str, why: str) -> None:
        super().__init__(why)
        self.status, self.kind = status, kind


class _Entry(NamedTuple):
    """A row, the key that has put it, and when it expires."""

    row: Row
    owner: str
    until: float


class _Instance:
    """What the ranks of one DP rank have said."""

    def __init__(self) -> None:
        self.ranks: dict[int, _Entry] = {}
        self.rooms: OrderedDict[int, None] = OrderedDict()
        """The room that was put last is the last one."""


class _Table:
    """The ranks of one start of prefill, and which DP rank has which room. Any thread.

    The entries never contradict each other: what would contradict an entry is refused until that entry has expired.

    Args:
        lifetime: Seconds for which a silent rank is kept.
    """

    def __init__(self, lifetime: float) -> None:
        self._lifetime = lifetime
        self._lock = threading.Lock()
        self._instances: dict[int, _Instance] = {}
        """By DP rank. None is without ranks."""
        self._rooms: dict[int, int] = {}
        """The DP rank of each room, for all rooms of the instances."""
        self._swept = 0.0

    def put(self, row: Row, owner: str) -> None:
        """Register a rank, or renew its registration.

        Args:
            row: The rank.
            owner: The key whose holder says it.

        Raises:
            _Refused: It contradicts a rank that is registered. Nothing has changed.
        """
        with self._lock:
            self._expire()
            instance = self._instances.get(row.dp_rank, _Instance())
            # Registered ranks never contradict each other, so one of them speaks for all.
            some = next((each.row for each in self._entries()), row)
            fellow = next((each.row for each in instance.ranks.values()), row)
            held = instance.ranks.get(row.rank)
            if (some.ranks, some.dp_size) != (row.ranks, row.dp_size):
                raise self._contradicts(row, some, "shape")
            if fellow.instance != row.instance:
                raise self._contradicts(row, fellow, "instance")
            if held is not None and held.owner != owner:
                raise self._contradicts(row, held.row, "rank")
            instance.ranks[row.rank] = _Entry(row, owner, time.monotonic() + self._lifetime)
            self._instances[row.dp_rank] = instance

    def get(self) -> dict[str, Any]:
        """Where the ranks are, or how many are missing."""
        with self._lock:
            self._expire()
            instances = [
                [instance.ranks[rank].row for rank in sorted(instance.ranks)]
                for _, instance in sorted(self._instances.items())
            ]
        if not instances:
            return {"schema": SCHEMA, "missing": "all ranks"}
        some = instances[0][0]
        ranks, found = some.ranks * some.dp_size, sum(map(len, instances))
        if found < ranks:
            return {"schema": SCHEMA, "missing": f"{ranks - found} of {ranks}"}
        return {
            "schema": SCHEMA,
            "http_port": some.http_port,
            "follows": all(row.follows for rows in instances for row in rows),
            "instances": [
                {"instance": rows[0].instance, "addresses": [row.address for row in rows]} for rows in instances
            ],
        }

    def put_rooms(self, number: int, rooms: list[int], owner: str) -> None:
        """Note the rooms of a DP rank, which its first rank tells.

        Raises:
            _Refused: The holder of the key has not registered as that rank.
        """
        with self._lock:
            self._expire()
            instance = self._instances.get(number)
            first = None if instance is None else instance.ranks.get(0)
            if instance is None or first is None or first.owner != owner:
                raise _Refused(409, "rooms", f"the sender is not registered as the first rank of DP rank {number}")
            for room in rooms:
                former = self._rooms.get(room)
                if former is not None:
                    del self._instances[former].rooms[room]
                self._rooms[room] = number
                instance.rooms[room] = None
            while len(instance.rooms) > KEPT_ROOMS // first.row.dp_size:
                del self._rooms[instance.rooms.popitem(last=False)[0]]

    def ranks(self, rooms: list[int]) -> dict[str, Any]:
        """The DP ranks of some rooms, as far as they are known."""
        with self._lock:
            found = {str(room): self._rooms[room] for room in rooms if room in self._rooms}
        return {"schema": SCHEMA, "ranks": found}

    def _entries(self) -> Iterator[_Entry]:
        return (each for instance in self._instances.values() for each in instance.ranks.values())

    def _expire(self) -> None:
        """Forget ranks that have been silent for too long. The caller holds the lock."""
        now = time.monotonic()
        if now - self._swept < SWEEP_SHARE * self._lifetime:
            return
        self._swept = now
        for number, instance in list(self._instances.items()):
            instance.ranks = {rank: entry for rank, entry in instance.ranks.items() if entry.until > now}
            if not instance.ranks:
                del self._instances[number]
                for room in instance.rooms:
                    del self._rooms[room]

    def _contradicts(self, row: Row, other: Row, kind: str) -> _Refused:
        return _Refused(
            409,
            kind,
            f"{_shown(row)} contradicts {_shown(other)}, which is registered; one of an earlier start "
            f"expires {self._lifetime:g} s after it last registered",
        )


def _shown(row: Row) -> str:
    place = f"DP rank {row.dp_rank} of {row.dp_size}, " if row.dp_size > 1 else ""
    return f"rank {row.rank} of {row.ranks} ({place}instance {row.instance!r:.80}, at {row.address!r:.80})"


def _decoded(body: bytes) -> Any:
    """Decode JSON.

    Raises:
        ValueError: It is none, or is nested too deeply.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _of_this_version(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("schema") != SCHEMA:
        raise ValueError(f"this server speaks version {SCHEMA}")
    return given


def _rooms_of(given: Any) -> list[int]:
    """The rooms in decoded JSON.

    Raises:
        ValueError: It does not list any.
    """
    if not isinstance(given, dict) or given.get("schema") != SCHEMA or "rooms" not in given:
        raise ValueError(f"version {SCHEMA} of this message has 'rooms'")
    rooms = given["rooms"]
    if type(rooms) is not list or len(rooms) > MOST_ROOMS or not all(type(room) is int for room in rooms):
        raise ValueError(f"rooms are listed as numbers, at most {MOST_ROOMS} at once")
    return rooms


class _Intake:
    """Takes what is put, and says it. Any thread.

    Args:
        lifetime: Seconds for which a silent rank is kept.
        allow: Keys that may put something; ``None`` if any may.
    """

    def __init__(self, lifetime: float, allow: frozenset[str] | None) -> None:
        self.table = _Table(lifetime)
        self.offers = OfferTable()
        self._allow = allow
        self._pair = KeyPair()
        self._lock = threading.Lock()
        """Held while refusals are counted."""
        self._refused = Tally()

    def put(self, path: str, body: bytes, key: str, proof: str) -> tuple[int, dict[str, Any]]:
        """Take a message that puts something. Returns the HTTP status and the answer.

        Raises:
            ValueError: It is no message of this path.
        """
        given = _decoded(body)
        told = TOLD[path](given)
        if not self._pair.is_proven(key, proof, path, body):
            # The normal first answer to a rank, which does not know this server's key yet. So it is not logged.
            return 401, {"error": "the message has no proof for the key of this server", "key": self._pair.public}
        try:
            self._check(key, told)
            if isinstance(told, Row):
                self.table.put(told, key)
            elif isinstance(told, Offered):
                if why := self.offers.put(told, key):
                    raise _Refused(409, "offers", why)
                return 200, {"schema": SCHEMA, "name": self.offers.name}
            elif isinstance(told, Known):
                return 200, {"schema": SCHEMA, **self.offers.news(told)}
            else:
                self.table.put_rooms(told.dp_rank, told.rooms, key)
        except _Refused as error:
            with self._lock:
                due, times = self._refused.note(error.kind), self._refused[error.kind]
            if due:
                log.warning("the bootstrap server refuses what it is told (%d times like this): %s", times, error)
            return error.status, {"error": str(error)}
        return 200, {"schema": SCHEMA}

    def _check(self, key: str, told: _Told) -> None:
        """Refuse a key that may put nothing, or not this row."""
        if self._allow is not None and key not in self._allow:
            why = f"the key {key} is neither this server's own nor one that it allows; add it to 'allow' of 'keys'"
            raise _Refused(403, "key", why)
        if isinstance(told, Row) and key_in(told.address) != ("" if self._allow is None else key):
            whose = "none, as this server has none" if self._allow is None else f"{key}, which has put it"
            raise _Refused(403, "address", f"the key in the address of {_shown(told)} is expected to be {whose}")


TOLD: dict[str, Callable[[Any], _Told]] = {
    PATH: Row.read,
    ROOMS_PATH: _Rooms.read,
    OFFERS_PATH: lambda given: Offered.read(_of_this_version(given)),
    NEWS_PATH: lambda given: Known.read(_of_this_version(given)),
}
"""What is put at each path."""


class BootstrapServer:
    """Listens under SGLang's bootstrap port until the process ends. SGLang keeps a reference and does nothing else.

    Args:
        host: Where to listen.
        port: The port.
        lifetime: Seconds for which a silent rank is listed.

    Raises:
        OSError: It cannot listen there.
        ConfigError: The keys in the configuration cannot be used.
    """

    def __init__(self, host: str, port: int, lifetime: float = LIFETIME_SECONDS) -> None:
        intake = _Intake(lifetime, allowed(read_options("prefill").keys))
        handler = type("_Handler", (_Handler,), {"intake": intake})
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
    intake: _Intake
    timeout = TIMEOUT
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        """A rank says where it is, or which rooms it has, or what it offers or knows of offers."""
        key, proof = self.headers.get(KEY_HEADER, ""), self.headers.get(PROOF_HEADER, "")
        put = self.intake.put
        self._take(dict.fromkeys(TOLD, lambda body: put(self.path, body, key, proof)))

    def do_POST(self) -> None:
        """Decode asks which DP ranks have rooms."""
        self._take({ROOMS_PATH: lambda body: (200, self.intake.table.ranks(_rooms_of(_decoded(body))))})

    def _take(self, takers: Mapping[str, Callable[[bytes], tuple[int, dict[str, Any]]]]) -> None:
        """Answer a request that has a body of JSON."""
        try:
            length, most = int(self.headers.get("Content-Length", "-1")), MAX_BODIES.get(self.path, MAX_BODY)
            if not 0 <= length <= most:
                raise ValueError(f"a body of {length} bytes")
            body = self.rfile.read(length)
            if self.path in takers:
                self._answer(*takers[self.path](body))
            else:
                self._answer(404, {"error": f"no such path: {self.path:.80}"})
        except ValueError as error:
            self.close_connection = True
            self._answer(400, {"error": str(error)})

    def do_GET(self) -> None:
        """Decode asks where the ranks are; a probe asks whether this server lives."""
        if self.path == PATH:
            found = self.intake.table.get()
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
