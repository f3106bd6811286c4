"""Finds out why nobody has answered over a connection that a link dialled."""

from __future__ import annotations

import enum
import errno
import select
import socket
import threading
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["Dialling", "Trouble"]

_Resolved = tuple[int, Any]
"""A family of addresses, and an address of it as `socket` takes it."""


class _Said(NamedTuple):
    what: str
    hint: str


class Trouble(enum.Enum):
    """Why nobody has answered at an address, as far as the socket library can tell."""

    NO_ANSWER = _Said(
        "nobody answers the attempt to connect", "is the address right, its machine up, and no firewall in between?"
    )
    UNKNOWN_HOST = _Said("its host name is not known here", "is the name right? Can this machine resolve it?")
    REFUSED = _Said(
        "the connection is refused: nothing listens there", "does it run, and listen at this host and this port?"
    )
    UNREACHABLE = _Said(
        "its host cannot be reached", "is the machine up, and on this network? Does a firewall reject the connection?"
    )
    NO_ROUTE = _Said(
        "this machine has no route to its network", "see `ip route get` with its host: is the address right?"
    )
    FORBIDDEN = _Said(
        "this machine, or a firewall, forbids the connection",
        "see the firewall's rules, and `ip route get` with its host",
    )
    FAILED = _Said("the attempt to connect fails", "can this machine open a connection to it, such as with nc?")
    NAME = _Said(
        "it says a name that is not one of its key's, so that its messages are dropped",
        "is a process with that key wrong, or hostile? Do both sides have the same version of statelink?",
    )
    DROPPED = _Said(
        "what it says is no message that this link knows, and is dropped",
        "see the log; do both sides have the same version of statelink?",
    )
    KEY = _Said(
        "it does not allow this link's key", "on the other side, add this link's public key to 'allow' of 'keys'"
    )
    KEYS = _Said(
        "one of the two sides has keys and the other has none",
        "configure keys on both sides, and give its address with its public key",
    )
    ENDED = _Said(
        "it ends the connection before it says who it is",
        "is that a port of Statelink, with the key in its address? Do both sides have keys, or neither?",
    )
    SILENT = _Said(
        "it takes connections and does not speak",
        "is that a port of Statelink? Is its process stopped, or its machine overloaded?",
    )
    MUTE = _Said(
        "it is connected and has not said who it is",
        "is that a port of Statelink? Is its process stopped, or its machine overloaded?",
    )
    QUIET = _Said(
        "it answered before, and does not answer now",
        "does it still run? Is its process stopped, or its machine overloaded?",
    )

    @property
    def what(self) -> str:
        """What is wrong, as a clause about the address."""
        return self.value.what

    @property
    def hint(self) -> str:
        """What to look at."""
        return self.value.hint


OF_ERRNO = {
    errno.ECONNREFUSED: Trouble.REFUSED,
    errno.EHOSTUNREACH: Trouble.UNREACHABLE,
    errno.EHOSTDOWN: Trouble.UNREACHABLE,
    errno.ENETUNREACH: Trouble.NO_ROUTE,
    errno.EACCES: Trouble.FORBIDDEN,
    errno.EPERM: Trouble.FORBIDDEN,
    errno.ETIMEDOUT: Trouble.NO_ANSWER,
}
"""What the error of an attempt to connect means; others are `Trouble.FAILED`."""
BEFORE = frozenset({*OF_ERRNO.values(), Trouble.FAILED, Trouble.UNKNOWN_HOST})
"""Troubles that are over once a connection is made."""
LOOKED_AT = (
    zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
)


class _Attempt:
    """One plain attempt to connect, beside the socket library, which does not tell the error of its own attempts.

    It belongs to one thread, which it never blocks: a host name is resolved on a thread of its own.

    Args:
        address: ``tcp://host:port``.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._where = host.strip("[]"), int(port)
        self._resolved: _Resolved | None = None
        """What the thread has found, until the attempt is made."""
        self._error: int | None = None
        self._socket: socket.socket | None = None
        try:
            self._connect(self._lookup(socket.AI_NUMERICHOST))
        except (OSError, UnicodeError):  # a name
            try:
                threading.Thread(target=self._resolve, name="statelink-resolve", daemon=True).start()
            except RuntimeError:  # the system has no thread left: why attempts fail stays unknown
                self._error = 0

    def _lookup(self, flags: int) -> _Resolved:
        family, _, _, _, where = socket.getaddrinfo(*self._where, type=socket.SOCK_STREAM, flags=flags)[0]
        return family, where

    def _resolve(self) -> None:
        """Runs on the thread of its own."""
        try:
            self._resolved = self._lookup(0)
        except (OSError, UnicodeError):
            self._error = 0  # the socket library finds out the same

    def _connect(self, resolved: _Resolved) -> None:
        family, where = resolved
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._error = error.errno or 0
            return
        made.setblocking(False)
        begun = made.connect_ex(where)
        if begun == errno.EINPROGRESS:
            self._socket = made
        else:
            made.close()
            self._error = begun

    def error(self) -> int | None:
        """The number of its error; 0 if it has none, and ``None`` while it is under way. Does not block."""
        if self._resolved is not None:
            resolved, self._resolved = self._resolved, None
            self._connect(resolved)
        if self._socket is not None:
            waiting = select.poll()
            waiting.register(self._socket, select.POLLOUT)
            if waiting.poll(0):
                self._error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                self.close()
        return self._error

    def close(self) -> None:
        """End it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Dialling:
    """Reads the events that the socket library records for one connection.

    It belongs to the thread that owns the socket. The library records a few events for each attempt to connect, and
    keeps 2000 of them. So `trouble` must be read at least once in a few minutes, or the object closed.

    Args:
        socket: A socket that is about to connect, to one address.
        address: The address, ``tcp://host:port``.
        before: The trouble of an earlier connection to this address. It counts until more is known.
    """

    def __init__(self, socket: zmq.Socket[Any], address: str, before: Trouble | None = None) -> None:
        self._socket = socket
        self._address = address
        self._attempt: _Attempt | None = None
        self._events = socket.get_monitor_socket(LOOKED_AT)
        self._events.linger = 0
        self._trouble = before or Trouble.NO_ANSWER
        self._tried = False  # whether the name was resolved since the last attempt ended

    def trouble(self) -> Trouble:
        """Why nobody has answered so far. Does not block."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            self._take(int(event["event"]), int(event["value"]))
        if self._attempt is not None:
            error = self._attempt.error()
            if error is not None:
                self._attempt = None
                if error and self._trouble in BEFORE:
                    self._trouble = OF_ERRNO.get(error, Trouble.FAILED)
        return self._trouble

    @property
    def noted(self) -> Trouble:
        """What `trouble` last returned. Any thread."""
        return self._trouble

    def dropped(self, code: str) -> None:
        """Note that a message was dropped, with the code of the error."""
        self._trouble = Trouble.NAME if code == "wire.sender" else Trouble.DROPPED

    def _take(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECT_RETRIED:
            if not self._tried:  # the attempt ended before the name was resolved
                self._trouble = Trouble.UNKNOWN_HOST
            self._tried = False
            return
        self._tried = True
        if event == zmq.EVENT_CLOSED:  # an attempt failed
            if self._trouble not in BEFORE:
                self._trouble = Trouble.FAILED
            if self._attempt is None:
                self._attempt = _Attempt(self._address)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            # The event may be read after a message that came later, and may be that of a connection that was made anew.
            if self._trouble not in (Trouble.NAME, Trouble.DROPPED):
                self._trouble = Trouble.MUTE
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._trouble = Trouble.KEY
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            self._trouble = Trouble.KEYS if mismatch else Trouble.ENDED
        elif self._trouble in (Trouble.KEY, Trouble.KEYS):
            pass  # the library reports the same failure again, with less detail
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._trouble = Trouble.SILENT if value == errno.EAGAIN else Trouble.ENDED
        elif event == zmq.EVENT_DISCONNECTED and self._trouble is not Trouble.SILENT:
            self._trouble = Trouble.ENDED
        elif event == zmq.EVENT_CONNECTED and self._trouble in BEFORE:
            self._trouble = Trouble.SILENT

    def close(self) -> None:
        """Stop reading events. Call it before the socket is closed."""
        if self._attempt is not None:
            self._attempt.close()
        if not self._events.closed:
            self._socket.disable_monitor()
            self._events.close()
