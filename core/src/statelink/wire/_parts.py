"""Sends large messages in parts. ZeroMQ then holds little for a connection, and no connection waits for long.

A message whose body fits into a frame has two frames: its kind and its body. A larger message is sent as several
messages of three frames: its kind, a part of the body, and where the part begins, together with the length of the
whole.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from statelink.errors import WireError

from ._limits import MAX_FRAME

__all__ = ["Parts", "cut"]

PART = MAX_FRAME - (1 << 10)
"""Most bytes of a part. It is less than a frame, because encryption adds bytes."""
LEAST_COUNTED_BYTES = 64 << 10
"""Bytes that an unfinished message counts as, if it has fewer. So their number is bounded, too: nobody says when a
connection ends, and a stranger may open one after the other. A link's own has at least one whole part."""
_PLACE = struct.Struct("<QQ")


def cut(frames: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The messages in which a kind and a body are sent."""
    kind, body = frames
    if len(body) <= PART:
        yield [kind, body]
        return
    view = memoryview(body)
    for first in range(0, len(body), PART):
        yield [kind, bytes(view[first : first + PART]), _PLACE.pack(first, len(body))]


class _Partial(NamedTuple):
    kind: bytes
    total: int
    body: bytearray

    @property
    def counted(self) -> int:
        return max(len(self.body), LEAST_COUNTED_BYTES)


class Parts:
    """Puts messages together that several connections send in parts. Belongs to one thread.

    Args:
        most: Most bytes of unfinished messages, of all connections together, where each counts as
            `LEAST_COUNTED_BYTES` or more. If there are more, the message of the connection that has been silent for
            longest is dropped, and its sender has to send it again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._partial: OrderedDict[Hashable, _Partial] = OrderedDict()
        self._counted = 0

    def add(self, connection: Hashable, frames: Sequence[bytes], limit: int) -> list[bytes] | None:
        """Take a part. Return the whole message once it is complete.

        Args:
            connection: The connection over which it came.
            frames: Its three frames.
            limit: Most bytes of a message of its kind.

        Raises:
            WireError: The part does not begin where the last one ended, or the whole message is too large. The earlier
                parts are dropped.
        """
        kind, part, place = frames
        first, total = _PLACE.unpack(place) if len(place) == _PLACE.size else (1, 0)
        known = self._partial.pop(connection, None)
        if known is not None:
            self._counted -= known.counted
        if total > limit:
            raise WireError(f"a message of {total} bytes", cause=f"at most {limit} are taken", code="wire.size")
        if not first:
            known = _Partial(kind, total, bytearray())
        if known is None or (known.kind, known.total, len(known.body)) != (kind, total, first):
            raise WireError("a part of a message does not follow the part before it", code="wire.frames")
        if not part or first + len(part) > total:
            raise WireError("a part of a message does not follow the part before it", code="wire.frames")
        known.body.extend(part)
        if len(known.body) == total:
            return [kind, known.body]  # type: ignore[list-item]  # decoders take any buffer
        self._partial[connection] = known
        self._counted += known.counted
        while self._counted > self._most:
            _, oldest = self._partial.popitem(last=False)
            self._counted -= oldest.counted
        return None

    def forget(self, connection: Hashable) -> None:
        """Drop the unfinished message of a connection."""
        known = self._partial.pop(connection, None)
        if known is not None:
            self._counted -= known.counted
