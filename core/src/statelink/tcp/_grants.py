"""Grants: what peers may write into this process's memory, and how a grant is revoked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from statelink.backend import Ranges, Transfer
from statelink.errors import TransferError

if TYPE_CHECKING:
    from ._iovec import U64

__all__ = ["Grant", "Grants"]

Key = tuple[str, int, int]
"""Peer, room, generation."""


class Grant:
    """What one peer may write for one use of a room.

    A receiver moves bytes in pieces. It calls `enter` before each piece and `leave` after it. A revoke is complete when
    no piece is between the two. So it waits for one system call on memory, and never for a peer.
    """

    __slots__ = ("_due", "_inside", "_landed", "_lock", "_owner", "_revokes", "_then", "key", "ranges", "revoked")

    def __init__(self, owner: Grants, key: Key, ranges: Ranges) -> None:
        self.key = key
        self.ranges = ranges
        self.revoked = False
        self._owner = owner
        self._lock = owner.lock
        self._inside = 0
        self._revokes: list[Transfer] = []
        self._landed = self._due = 0
        """Bytes of whole batches that have landed, and how many of them `_then` waits for."""
        self._then: Callable[[], object] | None = None

    def enter(self) -> bool:
        """Begin a piece; ``False`` if the grant was revoked."""
        with self._lock:
            if self.revoked:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """End a piece."""
        with self._lock:
            self._inside -= 1
            if self.revoked and not self._inside:
                self._finish()

    def land(self, nbytes: int) -> None:
        """A batch of so many bytes has landed."""
        with self._lock:
            self._landed += nbytes
            then = self._take()
        if then is not None:
            then()

    def when_landed(self, nbytes: int, then: Callable[[], object]) -> Callable[[], object] | None:
        """Call ``then`` once so many bytes have landed. If they have, returns it. The caller holds the lock."""
        self._due, self._then = nbytes, then
        return self._take()

    def _take(self) -> Callable[[], object] | None:
        """Who is to be called. The caller holds the lock, and calls it without the lock."""
        if self._then is None or self._landed < self._due or self.revoked:
            return None
        then, self._then = self._then, None
        return then

    def revoke(self, transfer: Transfer) -> None:
        """Let no further piece begin. ``transfer`` succeeds when no piece is under way. The caller holds the lock."""
        self.revoked = True
        if self._inside:
            self._revokes.append(transfer)
        else:
            self._owner.remove(self)
            transfer.succeed()

    def _finish(self) -> None:
        self._owner.remove(self)
        while self._revokes:
            self._revokes.pop().succeed()


class Grants:
    """All grants of one backend. Safe to use from any thread.

    Args:
        registered: This backend's own memory. Nothing else can be granted.
    """

    def __init__(self, registered: Ranges) -> None:
        self.lock = threading.Lock()
        self._registered = registered
        self._grants: dict[Key, Grant] = {}

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        """Grant ``peer`` these ranges, in addition to those that it has for this use of the room.

        Raises:
            TransferError: The ranges are not sorted, disjoint and in registered memory.
        """
        who = {"backend": "tcp", "peer": peer, "room": str(room)}
        try:
            ranges = Ranges(addresses, nbytes)
        except ValueError as error:
            raise TransferError("these ranges cannot be granted", cause=str(error), **who) from error
        at = self._registered.outside(addresses, nbytes)
        if at is not None:
            raise TransferError(
                "these ranges cannot be granted",
                cause=f"range {at} ({_shown(addresses, nbytes, at)}) is not in registered memory",
                **who,
            )
        key = (peer, room, generation)
        with self.lock:
            present = self._grants.get(key)
            if present is None or present.revoked:
                self._grants[key] = Grant(self, key, ranges)
                return
            # A batch that was checked against the smaller set may go on, because nothing was revoked.
            present.ranges = present.ranges.union(ranges)

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        """Revoke a grant. The transfer succeeds when nothing can land under it."""
        transfer = Transfer()
        with self.lock:
            grant = self._grants.get((peer, room, generation))
            if grant is None:
                transfer.succeed()
            else:
                grant.revoke(transfer)
        return transfer

    def when_landed(self, peer: str, room: int, generation: int, nbytes: int, then: Callable[[], object]) -> None:
        """Call ``then`` once batches with so many bytes have landed under a grant, unless it is revoked before."""
        with self.lock:
            grant = self._grants.get((peer, room, generation))
            due = None if grant is None else grant.when_landed(nbytes, then)
        if due is not None:
            due()

    def forget(self, peer: str) -> None:
        """Revoke all grants of ``peer``."""
        with self.lock:
            for key in [key for key in self._grants if key[0] == peer]:
                self._grants[key].revoke(Transfer())

    def remove(self, grant: Grant) -> None:
        """Drop a grant that has ended. The caller holds the lock."""
        if self._grants.get(grant.key) is grant:
            del self._grants[grant.key]

    def admit(self, peer: str, room: int, generation: int, targets: U64, nbytes: U64) -> Grant | str:
        """The grant that allows ``peer`` to write all of these blocks, or the reason why there is none."""
        with self.lock:
            grant = self._grants.get((peer, room, generation))
            if grant is None or grant.revoked:
                return f"this peer has no grant for room {room}, generation {generation}"
            ranges = grant.ranges
        at = ranges.outside(targets, nbytes)
        if at is not None:
            return f"block {at} ({_shown(targets, nbytes, at)}) is outside of what is granted for room {room}"
        return grant


def _shown(addresses: U64, nbytes: U64, at: int) -> str:
    return f"{int(nbytes[at])} bytes at {int(addresses[at]):#x}"
