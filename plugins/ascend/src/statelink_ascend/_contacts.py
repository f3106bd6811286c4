"""First calls to sessions, in which the library connects.

The library makes them one after the other, and waits up to two minutes for each. No option changes this. So this module
also makes them one after the other. The error of one that waits says for which peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from statelink.backend import leave_in_library

__all__ = ["Contacts", "Unreached"]

WAITS = (
    "the library waits for two minutes, and makes no other first contact meanwhile; see whether that peer still runs"
)


class Unreached(Exception):
    """A session was not reached.

    Attributes:
        cause: Why, as a clause.
        hint: What to do.
    """

    def __init__(self, cause: str, hint: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.hint = hint


class _Contact(threading.Thread):
    """One first call. It continues even if nobody waits for it."""

    def __init__(self, contacts: Contacts, peer: str, session: str, check: Callable[[], str]) -> None:
        super().__init__(name=f"statelink-ascend-contact-{session}", daemon=True)
        self.peer = peer
        self.session = session
        self.since = time.monotonic()
        self.failure = ""
        self._contacts = contacts
        self._check = check

    def __str__(self) -> str:
        return f"{self.session} of {self.peer}"

    def run(self) -> None:
        """Connect. If its turn came late, check first whether the peer still answers."""
        self.failure = self._check() or self._contacts.connect(self.session)
        self._contacts.ended()


class Contacts:
    """First contacts of one engine. Thread-safe.

    Args:
        connect: Makes one contact; returns why it failed, or nothing. Called on a thread of its own, never twice at
            once.
        release: Called once, after `close`, when no contact is under way, on the thread that notices it.
    """

    def __init__(self, connect: Callable[[str], str], release: Callable[[], None]) -> None:
        self.connect = connect
        self._release = release
        self._turn = threading.Condition()
        self._contact: _Contact | None = None
        self._closed = False

    def make(self, peer: str, session: str, seconds: float, check: Callable[[], str]) -> None:
        """Connect to a session. Blocks until this is done, or ``seconds`` are over.

        Args:
            peer: Name of its link, for errors.
            session: The session.
            seconds: How long to wait. The wait for its turn counts, too.
            check: Returns why the contact should not be tried, or nothing. Called directly before it, if its turn came
                late.

        Raises:
            Unreached: The contact failed, or did not end in time. It then continues, and a second call waits for it.
        """
        until = time.monotonic() + seconds
        late = False
        with self._turn:
            while (contact := self._contact) is not None and contact.session != session and not self._closed:
                late = True
                if not self._turn.wait(until - time.monotonic()):
                    waits = f"{time.monotonic() - contact.since:.0f} s"
                    cause = (
                        f"its turn has not come: the engine at {contact.session} of {contact.peer} has not answered for"
                    )
                    raise Unreached(f"{cause} {waits}", WAITS)
            if self._closed:
                raise Unreached("the backend is closed")
            if contact is None:
                contact = self._contact = _Contact(self, peer, session, check if late else str)
                contact.start()
                leave_in_library(contact)
        contact.join(max(until - time.monotonic(), 0.0))
        if contact.is_alive():
            raise Unreached(f"its engine at {session} did not answer within {seconds:g} s", WAITS)
        if contact.failure:
            raise Unreached(contact.failure)

    def ended(self) -> None:
        """A contact has ended. Called by its thread."""
        with self._turn:
            self._contact = None
            last = self._closed
            self._turn.notify_all()
        if last:
            self._release()

    def close(self) -> None:
        """Make no more contacts. May be called twice."""
        with self._turn:
            first, self._closed = not self._closed, True
            waits = self._contact is not None
            self._turn.notify_all()
        if first and not waits:
            self._release()

    def lingers(self) -> str:
        """Which engine the library still waits for after `close`, or nothing."""
        return str(self._contact) if self._closed and self._contact else ""
