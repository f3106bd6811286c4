"""The connections of this side's backend, which transport carries the bytes, and whether ``require`` allows it.

All calls of the backend about one peer are jobs of one key, in order.
"""

from __future__ import annotations

import functools
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink._logs import logger
from statelink.backend import UNKNOWN, Transports
from statelink.errors import PeerError, TransferError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Collection

    from statelink.backend import Backend
    from statelink.link.runtime import Workers
    from statelink.wire import Handshake

__all__ = [
    "Carrier",
    "Connection",
    "Connections",
    "check_transport",
    "known_transport",
    "tells_transport",
    "transport_of",
]

log = logger("statelink.link")

TRANSPORT_SECONDS = 0.01
"""Seconds between two calls that ask the backend for the transport."""
MAX_WORD = 256
"""Most characters of a transport's name that peers are told."""


class Carrier(NamedTuple):
    """What a backend says of the transport to a peer.

    Attributes:
        transport: The transport that carries the bytes; `UNKNOWN` where the backend cannot say.
        defect: What is wrong with the backend's answer, as a clause; empty for nothing.
    """

    transport: str
    defect: str = ""


@functools.cache
def tells_transport(backend: type[Backend]) -> bool:
    """Whether backends of a class tell their transport. Kept, since a check against a protocol takes long."""
    return issubclass(backend, Transports)


def transport_of(backend: Backend, peer: str) -> Carrier:
    """The transport that carries the bytes to a peer. Any thread."""
    if not tells_transport(type(backend)):
        return Carrier(UNKNOWN)
    telling: Any = backend
    try:
        found: object = telling.transport(peer)
    except BaseException as error:
        log.exception("backend %s failed to tell its transport", backend.name)
        return Carrier(UNKNOWN, f"the backend's `transport` raised {type(error).__name__}: {error}")
    if not isinstance(found, str):
        log.error("backend %s returned %.60r as its transport, and not a str", backend.name, found)
        return Carrier(UNKNOWN, f"the backend's `transport` returned {found!r:.60}, and not a str")
    return Carrier(found[:MAX_WORD] or UNKNOWN)


def _allows(require: Collection[str], transport: str) -> bool:
    """Whether ``require`` allows a transport. Where several carry the bytes, joined by ``+``, each must be allowed."""
    return not require or (bool(transport) and set(transport.split("+")) <= set(require) - {UNKNOWN})


def known_transport(require: Collection[str], ask: Callable[[], Carrier], patience: float) -> Carrier:
    """The transport that carries the bytes, once the backend can say it. Blocks; data threads only.

    Args:
        require: The transports that are allowed. If it is empty, any is, and this does not wait.
        ask: Returns what the backend says, with `UNKNOWN` while it cannot say the transport. After a defect, it is not
            asked again.
        patience: Seconds to wait at most.
    """
    until = time.monotonic() + patience
    while (found := ask()) == Carrier(UNKNOWN) and require and time.monotonic() < until:
        time.sleep(TRANSPORT_SECONDS)
    return found


def check_transport(require: Collection[str], carrier: Carrier, backend: str, peer: str) -> None:
    """Refuse a peer if its transport is not allowed, or is not known.

    Raises:
        PeerError: Names the required transports and the peer's.
    """
    transport, defect = carrier
    if not require or _allows(require, transport):
        return
    hint = "see the backend's options for the transports that it may use"
    if defect:
        hint = f"tell the author of the package; `statelink conform {backend} -k Connecting` tests it"
    elif transport in ("", UNKNOWN):
        hint = "set 'require' on prefill, too: its backend then finds out when it connects"
    raise PeerError(
        "the required transport does not carry the bytes to a peer",
        cause=f"{' or '.join(sorted(require))} is required, and "
        + (defect or f"the transport is {transport or UNKNOWN}"),
        hint=hint,
        code="peer.transport",
        backend=backend,
        peer=peer,
    )


class Connection:
    """The backend's connection to one peer. It counts its users, which are this link's roles.

    Attributes:
        handshake: The peer's handshake.
        made: Whether the backend reaches the peer. Jobs with the peer's key change it; any thread reads it.
    """

    __slots__ = ("_users", "handshake", "made")

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake
        self.made = False
        self._users = 0

    @property
    def used(self) -> bool:
        """Whether it has a user. Any thread."""
        return self._users > 0

    def join(self) -> None:
        """Add a user. Control thread."""
        self._users += 1

    def leave(self) -> bool:
        """Remove a user. Returns whether that was the last one. Control thread."""
        self._users -= 1
        return not self._users


class Connections:
    """Tells the backend which peers to connect to, and which to forget.

    A link has one of these, since both of its roles may use one connection to a peer. All calls about one peer, moves
    included, are jobs of one key: no late call for an ended connection reaches the backend after the next connection
    was made. Belongs to the control thread, except for `make`.

    Args:
        backend: The backend.
        workers: Run the backend's calls.
        explained: A context manager that adds to an error about memory which allocator setting may be the cause.
    """

    def __init__(
        self,
        backend: Backend,
        workers: Workers,
        explained: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._backend = backend
        self._workers = workers
        self._explained = explained
        self._wanted: dict[str, Connection] = {}
        self._tried: dict[str, Connection] = {}
        """Per peer, the connection that the backend was last asked to make. Jobs with the peer's key use its entry."""

    def use(self, backend: Backend) -> None:
        """Call another object of the same backend from now on. While there is no connection."""
        self._backend = backend

    def join(self, handshake: Handshake) -> Connection:
        """Become a user of the connection to a peer. The caller then submits a job that calls `make`.

        A peer that has registered its memory anew gets another connection, which takes the place of the one that this
        link's other role may still use until it learns of that.
        """
        connection = self._wanted.get(handshake.link)
        if connection is None or connection.handshake.registration < handshake.registration:
            connection = self._wanted[handshake.link] = Connection(handshake)
        connection.join()
        return connection

    def make(self, connection: Connection) -> None:
        """Connect, unless that was done, or nobody uses the connection any more. Blocks; for a job with the peer's key.

        Raises:
            StatelinkError: The backend's error. Some libraries register memory only here: if one refuses the memory,
                the error also names the allocator setting that may be the cause.
        """
        if connection.made or not connection.used:
            return
        handshake = connection.handshake
        self._tried[handshake.link] = connection
        try:
            self._backend.connect(handshake.link, handshake.descriptor, handshake.inventory.regions)
        except TransferError as error:
            if error.reason.code != "backend.memory":
                raise
            with self._explained():
                raise
        connection.made = True

    def leave(self, connection: Connection) -> None:
        """End a use of the connection. After the last use, the backend forgets the peer."""
        name = connection.handshake.link
        if connection.leave():
            if self._wanted.get(name) is connection:
                del self._wanted[name]
            self._workers.setups.submit_job(("peer", name), partial(self._end, connection))

    def _end(self, connection: Connection) -> None:
        """Forget the peer, if the backend has this connection to it. A job with the peer's key."""
        connection.made = False
        name = connection.handshake.link
        if self._tried.get(name) is connection:  # also one that failed: parts of it may exist
            del self._tried[name]
            self._backend.disconnect(name)
