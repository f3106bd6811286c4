"""Runs the source side for benchmarks of other hosts."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

import msgspec
import zmq

from statelink.errors import ConfigError, StatelinkError
from statelink.rendezvous import decode_json
from statelink.wire import (
    Endpoint,
    Gate,
    Keys,
    check_keys,
    host_of,
    only_this_host,
    parse_endpoint,
    parse_listen,
    unbound,
)

from ._ends import Local
from ._messages import MOST_MESSAGE_BYTES, REMOTE, Hello, Open, Over, Raw, Told

__all__ = ["Server"]

IDLE_SECONDS = 120.0
"""Seconds after which a benchmark that is silent may be replaced by another."""
ANSWER_SECONDS = 120.0
UNREAD_MESSAGES = 16
"""Messages that ZeroMQ holds for one connection before it stops reading from it."""
LOOK_MS = 500
"""Milliseconds between two looks at the signals of this process."""


class Server:
    """Listens for one benchmark at a time, and passes on to a side what it says. Belongs to one thread.

    Args:
        listen: ``tcp://host:port``; port 0 picks one.
        advertise: Host under which the other host reaches this one; the listening host if empty.
        keys: Keys that protect it; links get the same. Without, it listens on loopback only, unless ``insecure``.
        insecure: Listen beyond loopback without keys.
        config: Further keys of the configuration of its links.
        allocator: Allocates memory of a device, for any benchmark; see `statelink._devices.allocate`.
        most: Most bytes of the blocks of a request.

    Raises:
        ConfigError: It would listen beyond loopback without keys, its keys allow nobody, or it cannot listen.
    """

    def __init__(
        self,
        listen: str,
        *,
        advertise: str,
        keys: Keys | None,
        insecure: bool,
        config: dict[str, Any],
        allocator: str,
        most: int,
    ) -> None:
        endpoint = parse_endpoint(listen)
        host = host_of(endpoint.address)
        check_keys(keys)
        if keys is None and not insecure and not only_this_host(host):
            raise ConfigError(
                f"a benchmark would listen on {endpoint.address} without keys",
                hint="--secret-file and --allow-file, or --insecure on a network that is trusted wholly",
                code="config.keys",
            )
        if host in ("*", "0.0.0.0", "::") and not advertise:
            raise ConfigError(
                f"{endpoint.address} is no address that the other host can reach", hint="--host names one that it can"
            )
        self._host, self._config, self._allocator, self._most = advertise or host, config, allocator, most
        self._side: Local | None = None
        self._asked: _Asked | None = None
        self._session, self._heard = "", 0.0
        self._stops = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = Gate(self._context, keys.allow) if keys is not None else None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize, self._socket.rcvhwm = MOST_MESSAGE_BYTES, UNREAD_MESSAGES
        self._socket.ipv6 = ":" in host
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey, self._socket.curve_publickey = keys.secret.encode(), keys.public.encode()
        try:
            self._socket.bind(endpoint.address)
        except zmq.ZMQError as error:
            self.close()
            raise unbound(parse_listen(endpoint.address), error) from error
        port = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0").rpartition(":")[2]
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.address = str(Endpoint(f"tcp://{shown}:{port}", keys.public if keys is not None else ""))
        """Where benchmarks reach it, with its key."""

    def stop(self) -> None:
        """Let `serve` return, soon. Never blocks; a handler of a signal may call it."""
        self._stops = True

    def serve(self) -> None:
        """Answer until `stop` is called."""
        while not self._stops:
            watched: list[Any] = [self._socket]
            if self._gate is not None:
                watched.append(self._gate.socket)
            if self._side is not None and self._asked is not None:
                watched.append(self._side.fileno())
            # With a time limit: a signal that comes just before the wait would not end it.
            ready = [each for each, _ in zmq.zmq_poll([(each, zmq.POLLIN) for each in watched], LOOK_MS)]
            if self._gate is not None and self._gate.socket in ready:
                self._gate.answer()
            if self._asked is not None:
                self._look_at_side(answered=self._side is not None and self._side.fileno() in ready)
            if self._socket in ready:
                self._take()

    def close(self) -> None:
        """End the side, and stop listening."""
        self._end()
        self._socket.close()
        if self._gate is not None:
            self._gate.socket.close()
        self._context.term()

    def _take(self) -> None:
        """Take one message."""
        peer, *frames = self._socket.recv_multipart()
        if len(frames) != 2 or frames[0]:
            self._answer(peer, {"error": f"no message of a benchmark: {len(frames)} frames"})
            return
        try:
            told: Told = decode_json(frames[1], REMOTE)
        except ValueError as error:
            self._answer(peer, {"error": f"no message of a benchmark: {error}"})
            return
        self._handle(peer, told)

    def _answer(self, peer: bytes, answer: dict[str, Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it takes no answers
            self._socket.send_multipart([peer, b"", msgspec.json.encode(answer)], zmq.NOBLOCK)

    def _handle(self, peer: bytes, told: Told) -> None:
        now = time.monotonic()
        if told.session != self._session:
            if self._asked is not None or (self._side is not None and now - self._heard < IDLE_SECONDS):
                self._answer(peer, {"error": "another benchmark runs", "hint": "wait until it has ended"})
                return
            self._end()
            self._session = told.session
        self._heard = now
        if isinstance(told, (Hello, Over)):
            if isinstance(told, Over):
                self._end()
            self._answer(peer, {})
        elif self._asked is not None:
            self._answer(peer, {"error": f"it is still told to {self._asked.told.task}"})
        else:
            self._tell(peer, told)

    def _tell(self, peer: bytes, told: Told) -> None:
        """Pass on to the side what it is told. `_look_at_side` sends the answer."""
        if isinstance(told, Open):
            wanted = told.block * told.count
            if wanted > self._most:
                self._answer(
                    peer, {"error": f"it would need {wanted} bytes", "hint": f"--most allows {self._most} there"}
                )
                return
            # What runs here, and where it listens, is for this host to say.
            told = msgspec.structs.replace(told, config=self._config, memory=(told.memory[0], self._allocator))
        elif isinstance(told, Raw):
            told = msgspec.structs.replace(told, host=self._host)
        self._asked = _Asked(peer, told, time.monotonic() + ANSWER_SECONDS)
        try:
            if self._side is None:
                self._side = Local("prefill")
            self._side.tell(told)
        except StatelinkError as error:
            self._fail(error)

    def _look_at_side(self, *, answered: bool) -> None:
        """Pass on the side's answer, if it has one. It is ended if it takes too long for it."""
        assert self._side is not None
        assert self._asked is not None
        asked = self._asked
        try:
            if answered:
                answer = self._side.answer()
                self._asked, self._heard = None, time.monotonic()
                self._answer(asked.peer, answer)
            elif time.monotonic() > asked.until:
                raise self._side.silent(asked.told, ANSWER_SECONDS)
        except StatelinkError as error:
            self._fail(error, end=not answered)

    def _fail(self, error: StatelinkError, *, end: bool = False) -> None:
        """Say why the side did not do what it was told. A side without a link, or without an answer, is ended."""
        asked, session = self._asked, self._session
        assert asked is not None
        if not end:
            self._asked = None
        if end or isinstance(asked.told, Open):
            self._end()
            self._session = session
        self._answer(asked.peer, {"error": error.reason.cause or error.reason.what, "hint": error.hint})

    def _end(self) -> None:
        """End the side: at once if it is busy, because nobody waits for what it does."""
        side, asked = self._side, self._asked
        self._side, self._asked, self._session = None, None, ""
        if side is not None:
            with contextlib.suppress(OSError):
                side.close() if asked is None else side.close(0.0)


class _Asked(NamedTuple):
    """What the side has been told and has not answered.

    Attributes:
        peer: Who waits for the answer.
        told: What it was told.
        until: When it is taken for dead.
    """

    peer: bytes
    told: Told
    until: float
