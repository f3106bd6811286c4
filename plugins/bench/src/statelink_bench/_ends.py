"""Reaches a side: in a process of this host, or through a server on another one."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq

from statelink.cli import ended_with
from statelink.errors import StatelinkError
from statelink.rendezvous import decode_json
from statelink.testing.process import Process, ProcessError
from statelink.wire import Dialling, Keys, Trouble, parse_endpoint

from ._messages import MOST_MESSAGE_BYTES, Hello, Over, Told
from ._side import Side

__all__ = ["End", "FailedError", "Local", "Remote"]

HELLO_SECONDS = 10.0
"""Seconds within which a server answers at all."""
UNREACHED_SECONDS = 3.0
"""Seconds within which there is a connection to a server."""
STEP_MS = 100
"""Milliseconds between two looks at the state of a connection."""
SERVER = "Is `statelink bench --serve` running at that address?"
Answer = dict[str, Any]


class FailedError(StatelinkError):
    """A side could not do what it was told, or has ended."""

    default_code = "bench.failed"


class End(Protocol):
    """A side, wherever it is. Used by one thread at a time."""

    def ask(self, told: Told, patience: float) -> Answer:
        """Tell it to do something. Blocks until it has answered.

        Raises:
            FailedError: It failed, has ended, or did not answer within ``patience`` seconds.
        """

    def gone(self) -> FailedError | None:
        """Why it is not there any more, as far as it is known at once; ``None`` if it seems to be there."""

    def close(self) -> None:
        """End it. May be called twice."""


class Local(Process[Side]):
    """A side in a process of its own on this host. What it prints goes to standard error.

    Args:
        role: See `statelink_bench._side.Side`.
    """

    def __init__(self, role: str) -> None:
        # What libraries print must not get between the results.
        super().__init__(partial(Side, role), name=role, output=2)

    def ask(self, told: Told, patience: float) -> Answer:
        """See `End.ask`."""
        self.tell(told)
        if not self.returns(patience):
            self.kill()  # what it may still answer must not be taken for the answer to something else
            raise self.silent(told, patience)
        return self.answer()

    def tell(self, told: Told) -> None:
        """Tell it to do something. Does not wait for the answer, which `answer` takes.

        Raises:
            FailedError: It has ended.
        """
        try:
            self.start(Side.do, told)
        except ProcessError as error:
            raise self._lost() from error

    def answer(self) -> Answer:
        """Take the answer. Blocks until there is one, for the seconds of a process's patience at most.

        Raises:
            FailedError: It failed, or has ended.
        """
        try:
            return _good(self.name, self.result())
        except ProcessError as error:
            raise self._lost() from error

    def silent(self, told: Told, patience: float) -> FailedError:
        """The error that says that it has not answered for so many seconds."""
        return FailedError(f"{self.name} did not answer", cause=f"it was told to {told.task}, {patience:.0f} s ago")

    def gone(self) -> FailedError | None:
        """See `End.gone`."""
        return None if self.alive else self._lost()

    def close(self, patience: float = 10.0) -> None:
        """See `End.close`. ``patience``: seconds that it gets to close what it has open."""
        self.dismiss()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience)
        self.end()

    def _lost(self) -> FailedError:
        return FailedError(f"{self.name} has ended", cause=ended_with(self.popen.wait()))


class Remote:
    """The source side on another host, through `statelink_bench._server.Server`.

    Args:
        address: ``tcp://host:port``, with the server's public key if it has one.
        keys: Keys of this process, if the server has a key.
        hello: Seconds within which the server has to answer at all.

    Raises:
        FailedError: Only one of the two has a key, or the server does not answer.
        ConfigError: The address is none.
    """

    def __init__(self, address: str, keys: Keys | None, *, hello: float = HELLO_SECONDS) -> None:
        endpoint = parse_endpoint(address)
        if bool(endpoint.key) != bool(keys):
            whose = "its address has a key and this process has none" if endpoint.key else "its address has no key"
            raise FailedError(f"cannot reach {endpoint.address}", cause=whose, hint="--secret-file and --allow-file")
        self._where, self._session = endpoint.address, secrets.token_hex(8)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        self._socket.maxmsgsize = MOST_MESSAGE_BYTES
        if keys is not None:
            self._socket.curve_serverkey = endpoint.key.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        self._keys, self._dialling, self._met = keys, Dialling(self._socket, endpoint.address), False
        self._socket.connect(endpoint.address)
        try:
            self.ask(Hello(), hello)
        except StatelinkError:
            self._leave()
            raise

    def ask(self, told: Told, patience: float) -> Answer:
        """See `End.ask`."""
        if gone := self.gone():
            raise gone
        try:
            self._socket.send(msgspec.json.encode(msgspec.structs.replace(told, session=self._session)))
        except zmq.ZMQError as error:
            cause = "it has not answered what it was told before"
            raise FailedError(f"{self._where} does not answer", cause=cause) from error
        began = time.monotonic()
        while not self._socket.poll(STEP_MS):
            waited = time.monotonic() - began
            if gone := self.gone():
                raise gone
            reached = self._met or self._dialling.trouble() is Trouble.MUTE  # asked each time: it finds out by and by
            unreached = not reached and waited > UNREACHED_SECONDS
            if unreached or waited > patience:
                raise self._silent(f"for {waited:.0f} s it has had to {told.task}")
        frames = self._socket.recv_multipart()
        if len(frames) != 1:
            raise FailedError(f"{self._where} answers something else", cause=f"{len(frames)} frames", hint=SERVER)
        try:
            answer = decode_json(frames[0], dict[str, Any])
        except ValueError as error:
            what = f"{self._where} answers something else"
            raise FailedError(what, cause=f"{error!s:.120}", hint=SERVER) from error
        good = _good(self._where, answer)
        self._met = True
        return good

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
                self.ask(Over(), HELLO_SECONDS)
            self._leave()

    def _leave(self) -> None:
        self._dialling.close()
        self._socket.close()
        self._context.term()


def _good(who: str, answer: Answer) -> Answer:
    """An answer that is no failure."""
    if "error" in answer:
        raise FailedError(f"{who} failed", cause=str(answer["error"]), hint=str(answer.get("hint", "")))
    return answer
