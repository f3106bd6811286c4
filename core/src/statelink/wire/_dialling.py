"""Finds out why nobody has answered over a connection that a link dialled."""

from __future__ import annotations

import enum
import errno
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["Dialling", "Trouble"]


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


BEFORE = (Trouble.NO_ANSWER, Trouble.UNKNOWN_HOST, Trouble.REFUSED)
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


class Dialling:
    """Reads the events that the socket library records for one connection.

    It belongs to the thread that owns the socket. The library records a few events for each attempt to connect, and
    keeps 2000 of them. So `trouble` must be read at least once in a few minutes, or the object closed.

    Args:
        socket: A socket that is about to connect, to one address.
        before: The trouble of an earlier connection to this address. It counts until more is known.
    """

    def __init__(self, socket: zmq.Socket[Any], before: Trouble | None = None) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(LOOKED_AT)
        self._events.linger = 0
        self._trouble = before or Trouble.NO_ANSWER
        self._tried = False  # whether the name was resolved since the last attempt ended

    def trouble(self) -> Trouble:
        """Why nobody has answered so far. Does not block."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)
            self._take(int(event["event"]), int(event["value"]))
        return self._trouble

    def _take(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECT_RETRIED:
            if not self._tried:  # the attempt ended before the name was resolved
                self._trouble = Trouble.UNKNOWN_HOST
            self._tried = False
            return
        self._tried = True
        if event == zmq.EVENT_CLOSED:
            self._trouble = Trouble.REFUSED
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
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
        if not self._events.closed:
            self._socket.disable_monitor()
            self._events.close()
