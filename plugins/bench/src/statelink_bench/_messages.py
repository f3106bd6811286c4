"""What a side of a benchmark is told, as JSON, with a bound for each number: another host may have written it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

__all__ = [
    "LARGEST_BLOCK",
    "MOST_BLOCKS",
    "MOST_INDICES",
    "MOST_MESSAGE_BYTES",
    "REMOTE",
    "Close",
    "Copy",
    "Hello",
    "Know",
    "Move",
    "Open",
    "Over",
    "Raw",
    "Receive",
    "Send",
    "Settle",
    "Told",
]

LARGEST_BLOCK = 1 << 40
"""Most bytes of a block."""
MOST_MESSAGE_BYTES = 1 << 20
"""Largest message. The longest says how a library is reached."""
MOST_BLOCKS = 1 << 18
"""Most blocks of a request."""
MOST_INDICES = 1 << 22
"""Most blocks of all requests that are sent together."""

Text = Annotated[str, Meta(max_length=512)]
Scalar = Annotated[str, Meta(max_length=65536)] | float | int | bool | None
Values = Scalar | list[Scalar] | dict[Text, Scalar]
Options = dict[Text, Scalar | list[Values] | dict[Text, Values]]
"""Options of a backend, which are not nested any deeper."""
Blocks = Annotated[int, Meta(ge=1, le=MOST_BLOCKS)]
Rooms = Annotated[int, Meta(ge=1, le=4096)]
Room = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Told(msgspec.Struct, frozen=True, kw_only=True, tag_field="do"):
    """A message. Its tag says what is to be done.

    Attributes:
        task: The same in words.
        session: The benchmark of which it is part; empty between two processes of one host.
    """

    task: ClassVar[str]
    session: Text = ""


class Hello(Told, frozen=True, kw_only=True, tag="hello"):
    """Say that it is there."""

    task = "say that it is there"


class Open(Told, frozen=True, kw_only=True, tag="open"):
    """Allocate pages, and open a link over them.

    Attributes:
        block: Bytes of a page.
        count: Most pages of a request.
        memory: Memory kind, and what allocates it; see `statelink._devices.allocate`. A server has its own allocator.
        backend: Name of the backend.
        options: Its options.
        config: Further keys of the link's configuration. A server uses its own.
    """

    task = "open a link"
    block: Annotated[int, Meta(ge=1, le=LARGEST_BLOCK)]
    count: Blocks
    memory: tuple[Text, Text]
    backend: Text
    options: Options
    config: dict[str, Any] = {}


class Send(Told, frozen=True, kw_only=True, tag="send"):
    """Send requests. Decode takes them one by one.

    Attributes:
        first: Room id of the first.
        rooms: How many.
        pages: Pages of each.
        scattered: Whether they are in random order.
        lasts: Seconds until each must have ended.
    """

    task = "send requests"
    first: Room
    rooms: Rooms
    pages: Blocks
    scattered: bool
    lasts: Annotated[float, Meta(gt=0, le=86400)]

    def __post_init__(self) -> None:
        if self.rooms * self.pages > MOST_INDICES:
            raise ValueError(f"{self.rooms} requests of {self.pages} blocks: at most {MOST_INDICES} blocks at once")


class Receive(Told, frozen=True, kw_only=True, tag="receive"):
    """Receive requests, one after the other.

    Attributes:
        first: Room id of the first.
        rooms: How many.
        pages: Pages of each.
        scattered: Whether they are in random order.
        peer: Address of the link that sends them.
        compared: Whether to compare the bytes of the last one.
    """

    task = "receive requests"
    first: Room
    rooms: Rooms
    pages: Blocks
    scattered: bool
    peer: Text
    compared: bool


class Settle(Told, frozen=True, kw_only=True, tag="settle"):
    """Wait until the requests that were sent have ended."""

    task = "say whether its requests have ended"


class Copy(Told, frozen=True, kw_only=True, tag="copy"):
    """Copy pages inside this process, so many times."""

    task = "copy"
    rounds: Rooms
    pages: Blocks
    scattered: bool


class Raw(Told, frozen=True, kw_only=True, tag="raw"):
    """Start the library by itself, which peers reach at ``host``. A server uses its own host."""

    task = "start the library by itself"
    host: Text


class Know(Told, frozen=True, kw_only=True, tag="know"):
    """Connect the library by itself.

    Attributes:
        raw: How the other side's library is reached.
        at: Address of the first page there.
        pages: How many pages will be moved.
        scattered: Whether they are in random order.
    """

    task = "connect the library by itself"
    raw: bytes
    at: Annotated[int, Meta(ge=0)]
    pages: Blocks
    scattered: bool


class Move(Told, frozen=True, kw_only=True, tag="move"):
    """Move the pages with the library by itself, so many times."""

    task = "measure the library by itself"
    rounds: Rooms


class Close(Told, frozen=True, kw_only=True, tag="close"):
    """Close what is open, and free the pages."""

    task = "close its link"


class Over(Told, frozen=True, kw_only=True, tag="end"):
    """The benchmark is over."""

    task = "end the benchmark"


REMOTE: Any = Hello | Open | Send | Settle | Raw | Know | Move | Close | Over
"""What a peer may tell a server."""
