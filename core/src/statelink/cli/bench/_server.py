"""Runs the source side for benchmarks of other hosts."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import zmq

from statelink.errors import ConfigError, StatelinkError
from statelink.wire import Endpoint, Gate, Keys, host_of, is_loopback, parse_endpoint, unbound

from ._ends import MOST_BYTES, Local

__all__ = ["Server"]

IDLE = 120.0
"""Seconds after which a benchmark that is silent may be replaced by another."""
PATIENCE = 120.0
TELL = frozenset({"open", "send", "settle", "raw", "know", "move", "close"})
"""What a peer may tell the source side to do."""
LOOK = 500
"""Milliseconds between two looks at the signals of this process."""


class Server:
    """Listens for one benchmark at a time, and passes on to a side what it says. Belongs to one thread.

    Args:
        listen: ``tcp://host:port``; port 0 picks one.
        advertise: Host under which the other host reaches this one; the listening host if empty.
        keys: Keys that protect it; links get the same. Without, it listens on loopback only, unless ``insecure``.
        insecure: Listen beyond loopback without keys.
        config: Further keys of the configuration of its links.
        most: Most bytes of memory that a benchmark may ask for.

    Raises:
        ConfigError: It would listen beyond loopback without keys, or cannot listen.
    """

    def __init__(
        self, listen: str, *, advertise: str, keys: Keys | None, insecure: bool, config: dict[str, Any], most: int
    ) -> None:
        endpoint = parse_endpoint(listen)
        host = host_of(endpoint.address)
        if keys is None and not insecure and not is_loopback(endpoint.address):
            raise ConfigError(
                f"a benchmark would listen on {endpoint.address} without keys",
                hint="--secret-file and --allow-file, or --insecure on a network that is trusted wholly",
                code="config.keys",
            )
        if host in ("*", "0.0.0.0", "::") and not advertise:
            raise ConfigError(
                f"{endpoint.address} is no address that the other host can reach", hint="--host names one that it can"
            )
        self._host, self._config, self._most = advertise or host, config, most
        self._side: Local | None = None
        self._session, self._heard = "", 0.0
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = Gate(self._context, keys.allow) if keys is not None else None
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.maxmsgsize = MOST_BYTES
        self._socket.ipv6 = ":" in host
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey, self._socket.curve_publickey = keys.secret.encode(), keys.public.encode()
        try:
            self._socket.bind(endpoint.address)
        except zmq.ZMQError as error:
            self.close()
            raise unbound(endpoint.address, error) from error
        port = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0").rpartition(":")[2]
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.address = str(Endpoint(f"tcp://{shown}:{port}", keys.public if keys is not None else ""))
        """Where benchmarks reach it, with its key."""

    def serve(self) -> None:
        """Answer until the process is interrupted."""
        poller = zmq.Poller()
        for each in (self._socket, self._gate.socket if self._gate is not None else None):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        while True:
            # With a time limit: a signal that comes just before the wait would not end it.
            ready = dict(poller.poll(LOOK))
            if self._gate is not None and self._gate.socket in ready:
                self._gate.answer()
            if self._socket in ready:
                self._socket.send(msgspec.json.encode(self._answer(self._socket.recv())))

    def close(self) -> None:
        """End the side, and stop listening."""
        self._end()
        self._socket.close()
        if self._gate is not None:
            self._gate.socket.close()
        self._context.term()

    def _answer(self, asked: bytes) -> dict[str, Any]:
        try:
            told = msgspec.json.decode(asked, type=dict[str, Any])
            session, what = str(told.pop("session", "")), str(told.pop("do", ""))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return {"error": f"no message of a benchmark: {error}"}
        now = time.monotonic()
        if session != self._session:
            if self._side is not None and now - self._heard < IDLE:
                return {"error": "another benchmark runs", "hint": "wait until it has ended"}
            self._end()
            self._session = session
        self._heard = now
        if what == "hello":
            return {}
        if what == "end":
            self._end()
            return {}
        return self._tell(what, told)

    def _tell(self, what: str, told: dict[str, Any]) -> dict[str, Any]:
        if what not in TELL:
            return {"error": f"a benchmark cannot be told to {what!r:.40}"}
        if what == "open":
            block, count = told.get("block"), told.get("count")
            wanted = block * count if isinstance(block, int) and isinstance(count, int) else 0
            if not 0 < wanted <= self._most:
                return {"error": f"it would need {wanted} bytes", "hint": f"--most allows {self._most} there"}
            told["config"] = self._config
        if what == "raw":
            told["host"] = self._host
        try:
            if self._side is None:
                self._side = Local("prefill")
            return self._side.ask(what, PATIENCE, **told)
        except StatelinkError as error:
            if what == "open":
                self._end()
            return {"error": error.reason.cause or error.reason.what, "hint": error.hint}

    def _end(self) -> None:
        side, self._side, self._session = self._side, None, ""
        if side is not None:
            with contextlib.suppress(OSError):
                side.close()
