"""Reading what peers say of themselves: small cards at once, large ones where nobody waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from statelink.errors import WireError
from statelink.wire import MAX_EFFORT, MAX_HANDSHAKE, read_handshake

from ._mover import reason_of

if TYPE_CHECKING:
    import msgspec

    from statelink.errors import Reason
    from statelink.wire import Handshake

    from ._node import Node

__all__ = ["Cards"]

log = logging.getLogger("statelink.link")

SMALL_CARD, SMALL_EFFORT = 16 << 10, 1 << 12
"""Bytes up to which, and effort with which, a card is read on the control thread: it takes milliseconds at most."""
MAX_WAITING = 4 * MAX_HANDSHAKE
"""Most bytes of cards that wait to be read."""

Made = TypeVar("Made")


class Cards:
    """Reads and checks cards. Belongs to the control thread; none of its methods blocks.

    Args:
        node: The link's control thread.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reading: set[str] = set()
        self._waiting = 0

    def read(
        self,
        peer: str,
        raw: msgspec.Raw,
        check: Callable[[Handshake], Made],
        then: Callable[[Made | None, Reason | None], None],
    ) -> None:
        """Read a card and check it; a large one on a thread of its own, one of a peer at a time.

        A card that comes while an earlier one of the peer is being read is dropped: who gets no answer says it again.
        One that comes while too much waits is dropped, too, and counted.

        Args:
            peer: Whose it is: its link name or address.
            raw: The card.
            check: Looks at it and makes something of it, on the same thread.
            then: Called on the control thread with what was made, or with why the card is refused.
        """
        nbytes = len(memoryview(raw))
        if nbytes <= SMALL_CARD:
            read, reason = _read(raw, check, SMALL_EFFORT)
            if reason is None or reason.code != "wire.effort":
                then(read, reason)
                return
        if peer in self._reading:
            return
        if self._waiting + nbytes > MAX_WAITING:
            cause = f"{self._waiting} bytes of others wait to be read"
            self._node.channel.count(WireError("a description came at a bad time", cause=cause, code="wire.busy"))
            return
        self._reading.add(peer)
        self._waiting += nbytes

        def job() -> None:  # on the lane of cards
            made, reason = _read(raw, check, MAX_EFFORT)
            self._node.post(lambda: done(made, reason))

        def done(made: Made | None, reason: Reason | None) -> None:
            self._reading.discard(peer)
            self._waiting -= nbytes
            then(made, reason)

        self._node.cards.submit(("card",), job)


def _read(raw: msgspec.Raw, check: Callable[[Handshake], Made], effort: int) -> tuple[Made | None, Reason | None]:
    try:
        return check(read_handshake(raw, effort)), None
    except BaseException as error:  # whatever is in it, it is the peer's
        return None, reason_of(error)
