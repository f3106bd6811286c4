"""Keeps handshakes that come while a link is suspended, and so has no descriptor to answer with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from statelink.errors import WireError

if TYPE_CHECKING:
    from statelink.wire import Hello

__all__ = ["HeldHellos"]


class HeldHellos:
    """The latest `Hello` of each peer. Belongs to the control thread; none of its methods blocks.

    Args:
        most: Most peers.
        most_bytes: Most bytes of their handshakes together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._held: dict[str, Hello] = {}
        self._nbytes = 0

    def add(self, hello: Hello) -> None:
        """Keep a handshake, instead of an earlier one of its sender.

        Raises:
            WireError: Too many others are kept (``wire.busy``). A peer that gets no answer repeats its handshake.
        """
        earlier = self._held.pop(hello.sender, None)
        if earlier is not None:
            self._nbytes -= _length(earlier)
        if len(self._held) >= self._most or self._nbytes + _length(hello) > self._most_bytes:
            raise WireError(
                "a handshake came while too many others wait",
                cause=f"{self._nbytes} bytes of {len(self._held)} others wait until this link is resumed",
                code="wire.busy",
            )
        # A copy, because the handshake is a view of the whole message, which may be larger.
        self._held[hello.sender] = msgspec.structs.replace(hello, handshake=hello.handshake.copy())
        self._nbytes += _length(hello)

    @property
    def all(self) -> Iterable[Hello]:
        """Every one that is kept."""
        return self._held.values()


def _length(hello: Hello) -> int:
    return len(memoryview(hello.handshake))
