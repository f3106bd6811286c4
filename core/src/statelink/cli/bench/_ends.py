"""Reaches a side: in a process of this host, or through a server on another one."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import time
from typing import Any, Protocol

import msgspec
import zmq

from statelink.errors import StatelinkError
from statelink.wire import Dialling, Keys, Trouble, parse_endpoint

from .._alone import ended_with
from ._side import serve

__all__ = ["MOST_BYTES", "End", "FailedError", "Local", "Remote"]

MOST_BYTES = 16 << 20
"""Largest message of a side."""
HELLO = 10.0
"""Seconds within which a server answers at all."""
UNREACHED = 3.0
"""Seconds within which there is a connection to a server."""
STEP = 100
"""Milliseconds between two looks at the state of a connection."""
TASKS = {
    "hello": "say that it is there",
    "open": "open a link",
    "send": "send requests",
    "settle": "say whether its requests have ended",
    "raw": "start the library by itself",
    "know": "connect the library by itself",
    "move": "measure the library by itself",
    "close": "close its link",
    "end": "end the benchmark",
}
"""What a server is told, in words."""
SERVER = "Is `statelink bench --serve` running at that address?"
Told = dict[str, Any]


class FailedError(StatelinkError):
    """A side could not do what it was told, or has ended."""

    default_code = "bench.failed"


class End(Protocol):
    """A side, wherever it is. Used by one thread at a time."""

    def ask(self, what: str, patience: float, **told: Any) -> Told:
        """Tell it to do something. Blocks until it has answered.

        Raises:
            FailedError: It failed, has ended, or did not answer within ``patience`` seconds.
        """

    def gone(self) -> FailedError | None:
        """Why it is not there any more, as far as it is known at once; ``None`` if it seems to be there."""

    def close(self) -> None:
        """End it. May be called twice."""


class Local:
    """A side in a process of its own on this host.

    Args:
        role: See `statelink.cli.bench._side.Side`.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(role, theirs), name=f"bench-{role}", daemon=True)
        self._process.start()
        theirs.close()  # so that this end notices if the process ends

    def ask(self, what: str, patience: float, **told: Any) -> Told:
        """See `End.ask`."""
        try:
            self._pipe.send_bytes(msgspec.json.encode({"do": what, **told}))
            if not self._pipe.poll(patience):
                raise FailedError(f"{self._role} did not answer", cause=f"it was told to {what}, {patience:.0f} s ago")
            answer = msgspec.json.decode(self._pipe.recv_bytes(), type=dict[str, Any])
        except (EOFError, OSError) as error:
            self._process.join(10)
            raise FailedError(f"{self._role} has ended", cause=_ended(self._process.exitcode)) from error
        return _checked(self._role, answer)

    def gone(self) -> FailedError | None:
        """See `End.gone`."""
        status = self._process.exitcode
        return None if status is None else FailedError(f"{self._role} has ended", cause=_ended(status))

    def close(self) -> None:
        """See `End.close`."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Remote:
    """The source side on another host, through `statelink.cli.bench._server.Server`.

    Args:
        address: ``tcp://host:port``, with the server's public key if it has one.
        keys: Keys of this process, if the server has a key.
        hello: Seconds within which the server has to answer at all.

    Raises:
        FailedError: Only one of the two has a key, or the server does not answer.
        ConfigError: The address is none.
    """

    def __init__(self, address: str, keys: Keys | None, *, hello: float = HELLO) -> None:
        endpoint = parse_endpoint(address)
        if bool(endpoint.key) != bool(keys):
            whose = "its address has a key and this process has none" if endpoint.key else "its address has no key"
            raise FailedError(f"cannot reach {endpoint.address}", cause=whose, hint="--secret-file and --allow-file")
        self._where, self._session = endpoint.address, secrets.token_hex(8)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        self._socket.maxmsgsize = MOST_BYTES
        if keys is not None:
            self._socket.curve_serverkey = endpoint.key.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        self._keys, self._dialling, self._met = keys, Dialling(self._socket), False
        self._socket.connect(endpoint.address)
        try:
            self.ask("hello", hello)
        except StatelinkError:
            self._leave()
            raise

    def ask(self, what: str, patience: float, **told: Any) -> Told:
        """See `End.ask`."""
        if gone := self.gone():
            raise gone
        self._socket.send(msgspec.json.encode({"session": self._session, "do": what, **told}))
        began = time.monotonic()
        while not self._socket.poll(STEP):
            waited = time.monotonic() - began
            if gone := self.gone():
                raise gone
            unreached = not self._met and waited > UNREACHED and self._dialling.trouble() is not Trouble.MUTE
            if unreached or waited > patience:
                raise self._silent(f"for {waited:.0f} s it has had to {TASKS.get(what, what)}")
        self._met = True
        return _checked(self._where, msgspec.json.decode(self._socket.recv(), type=dict[str, Any]))

    def _silent(self, told: str) -> FailedError:
        """The error of a server that does not answer."""
        what, trouble = f"{self._where} does not answer", self._dialling.trouble()
        if self._met:
            return FailedError(what, cause=told, hint="is its machine overloaded?")
        if trouble is Trouble.MUTE:
            cause, hint = "a server is connected, and it is not that of a benchmark, or it is busy", SERVER
            return FailedError(what, cause=cause, hint=hint)
        key = f": {self._keys.public}" if trouble is Trouble.KEY and self._keys else ""
        return FailedError(what, cause=trouble.what, hint=f"{trouble.hint}{key}" if key else f"{trouble.hint} {SERVER}")

    def gone(self) -> FailedError | None:
        """See `End.gone`."""
        if not self._met or self._dialling.trouble() is Trouble.MUTE:
            return None
        hint = "`statelink bench --serve` has ended there, or its machine is out of reach: start it again"
        return FailedError(f"the server at {self._where} has gone", cause="its connection ended", hint=hint)

    def close(self) -> None:
        """See `End.close`."""
        if not self._socket.closed:
            with contextlib.suppress(StatelinkError, zmq.ZMQError):
                self.ask("end", HELLO)
            self._leave()

    def _leave(self) -> None:
        self._dialling.close()
        self._socket.close()
        self._context.term()


def _checked(who: str, answer: Told) -> Told:
    if "error" in answer:
        raise FailedError(f"{who} failed", cause=str(answer["error"]), hint=str(answer.get("hint", "")))
    return answer


def _ended(status: int | None) -> str:
    if status is None:
        return "it closed its pipe"
    return ended_with(status)
