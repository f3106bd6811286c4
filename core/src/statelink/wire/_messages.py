"""Every message that two links exchange.

A message is two frames: its kind, and a msgpack map of the fields below. Unknown fields are ignored, and missing fields
have defaults, so that fields can be added. A message of an unknown kind is counted and dropped. ``sender`` and ``to``
are link names. No two processes ever have the same link name, so a message for an earlier incarnation is recognised.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

import msgspec

from statelink.backend import MAX_DESCRIPTOR, MAX_PREPARED, Moved
from statelink.errors import Reason
from statelink.plan import MAX_CONTENT, Assignment
from statelink.state import Inventory, StateType

__all__ = [
    "KINDS",
    "MAX_UNMET",
    "Attach",
    "Attached",
    "Bye",
    "Chunk",
    "Drained",
    "Failed",
    "Finished",
    "Handshake",
    "Hello",
    "Inquire",
    "ItemList",
    "Keep",
    "Message",
    "Note",
    "Ping",
    "Pong",
    "ProcessId",
    "Received",
    "Refuse",
    "Request",
    "RoomHeader",
    "Standing",
    "Unknown",
    "Unmet",
    "Welcome",
]

PROTOCOL = (3, 3)
"""Lowest and highest protocol version that this core speaks."""
MAX_INDICES = 1 << 22
"""Most indices in one request, for all components together."""
MAX_KINDS = 1024
"""Most state types, operations and components that a message names."""

Name = Annotated[str, msgspec.Meta(max_length=512)]
Room = Annotated[int, msgspec.Meta(ge=1)]  # the encoding itself has no integer above 2^64 - 1
Generation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Few = msgspec.Meta(max_length=MAX_KINDS)


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of every message.

    Attributes:
        sender: Link name of the sender.
        to: Link name of the receiver; empty if the sender does not know it yet.
    """

    sender: Name
    to: Name = ""


class RoomHeader(TypedDict):
    """The fields that every message about one use of a room id begins with."""

    sender: str
    to: str
    room: int
    generation: int


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the process of a link, so that another process of the same host can notice its end.

    Attributes:
        pid: Process id, in the process's own pid namespace.
        start: When the process started, in ticks since boot. Tells it from a later process with the same id.
        pid_namespace: Number of its pid namespace.
        boot: Boot id of its kernel.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    start: Count
    pid_namespace: Count
    boot: Annotated[str, msgspec.Meta(max_length=64)]


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """What a link tells a peer about itself. Sent in `Hello` and `Welcome`.

    Attributes:
        link: Link name. It contains the incarnation.
        protocol: Lowest and highest protocol version that the link speaks.
        version: Version of the core, for error texts.
        role: ``prefill``, ``decode`` or ``both``.
        backend: Name of the backend.
        kinds: Definitions of the state types in the inventory.
        strategies: Component to the name of its strategy.
        descriptor: What the backend needs to reach this side.
        inventory: What this rank holds, addresses included.
        process: The process that it runs in, if known.
        verify: What both sides compare before success: ``off`` or ``digest``.
        registration: How often the link has registered its memory before. A peer that knows another number connects
            again, because the descriptor is another.
    """

    link: Name
    protocol: tuple[int, int]
    version: Name
    role: Name
    backend: Name
    kinds: Annotated[tuple[StateType, ...], Few]
    strategies: Annotated[dict[Name, Name], Few]
    descriptor: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTOR)]
    inventory: Inventory
    process: ProcessId | None = None
    verify: Name = "off"
    registration: Count = 0


class ItemList(msgspec.Struct, frozen=True):
    """Indices of one component, as a little-endian array.

    Attributes:
        first: Number of the first item in its sequence.
        ids: int64, little endian.
    """

    first: Tokens
    ids: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_INDICES)]


class Hello(Message, frozen=True, kw_only=True):
    """A link introduces itself, and asks the other link to do the same.

    Attributes:
        handshake: A `Handshake`, encoded. It is decoded in two steps, so that a state type that this side does not know
            is refused by name.
    """

    handshake: msgspec.Raw


class Welcome(Message, frozen=True, kw_only=True):
    """The answer to `Hello`."""

    handshake: msgspec.Raw


class Refuse(Message, frozen=True, kw_only=True):
    """These two links cannot work together."""

    reason: Reason


class Attach(Message, frozen=True, kw_only=True):
    """Decode tells a prefill rank, the source, what it has to write.

    Attributes:
        assignment: What the source writes for this destination.
        destinations: Number of decode ranks that will send it a request for each room.
        digest: Decode's digest of the compiled plan.
        same_host: Whether decode sees the source's process on its own host, at the address that it dialled.
    """

    assignment: Assignment
    destinations: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    same_host: bool = False


class Attached(Message, frozen=True, kw_only=True):
    """The source has checked its assignment and can reach the destination, or is about to connect to it.

    Attributes:
        digest: Digest of the plan that the source compiled.
        transport: The transport that carries the bytes, as its backend says.
        connecting: Whether the source's backend still connects. It keeps requests until that has ended. Then another
            message follows, or `Refuse`.
    """

    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    transport: Annotated[str, msgspec.Meta(max_length=256)] = ""
    connecting: bool = False


class Unmet(msgspec.Struct, frozen=True):
    """An earlier use of a room id that ended on a decode rank, and that may not have met a room on prefill.

    Attributes:
        generation: Which use; 0 stands for any number of uses that are not remembered one by one.
        ended_ms_ago: Milliseconds since it ended.
    """

    generation: Generation
    ended_ms_ago: Count


MAX_UNMET = 8
"""Most earlier uses that a request names."""


class Request(Message, frozen=True, kw_only=True):
    """Decode is ready for a room.

    Attributes:
        room: The request.
        generation: Number that this decode rank chose for this use of the room id.
        tokens: N. Both sides must agree. If decode knows only the number of pages: the most that N can be.
        least: Then the fewest that N can be; otherwise 0.
        prefix: P, the number of positions that decode already holds.
        items: The items of each component in decode's memory.
        prepared: What each receive hook prepared for this writer.
        elsewhere: Components that the writer must not write to decode's items, because their hook has other memory.
        lifetime_ms: Milliseconds that this use may take on decode, from its beginning to its deadline.
        unmet: Earlier uses of the same room id, in the order in which they ended.
        content: The content of the request, as decode's engine states it; empty if it states none.
        landing: Whether decode itself sees when the bytes have landed. Then `Finished` need not wait for that.
    """

    room: Room
    generation: Generation
    tokens: Tokens
    prefix: Tokens
    items: Annotated[dict[Name, ItemList], Few] = {}
    prepared: Annotated[dict[Name, Annotated[bytes, msgspec.Meta(max_length=MAX_PREPARED)]], Few] = {}
    elsewhere: Annotated[list[Name], Few] = []
    lifetime_ms: Count = 0
    unmet: Annotated[tuple[Unmet, ...], msgspec.Meta(max_length=MAX_UNMET)] = ()
    least: Tokens = 0
    content: Annotated[bytes, msgspec.Meta(max_length=MAX_CONTENT)] = b""
    landing: bool = False


class Chunk(Message, frozen=True, kw_only=True):
    """One push is visible at the destination. The last one has no message of its own: see `Finished`.

    Attributes:
        room: The request.
        generation: Which use of the room id.
        number: Number of the push, from 0.
        granules: For each component, the ``[first, last)`` granules that moved.
        layers: ``[first, last)`` model layers, or ``None`` for all buffers.
        nbytes: Payload bytes of the push.
    """

    room: Room
    generation: Generation
    number: Count
    granules: Annotated[dict[Name, tuple[Count, Count]], Few]
    layers: tuple[int, int] | None = None
    nbytes: Count = 0


class Finished(Message, frozen=True, kw_only=True):
    """A source has written everything that it was assigned for a room, or has at least begun to.

    Attributes:
        room: The request.
        generation: Which use of the room id.
        digest: The source's digest of the plan.
        moved: How much it moved of each component.
        chunks: Number of pushes.
        granules: As `Chunk.granules`, of the last push.
        layers: As `Chunk.layers`, of the last push.
        digests: For each component, the digest of its bytes, if both sides verify.
        transport: The transport that carried the bytes, as its backend says.
        tokens: N, if decode's request did not say it; otherwise 0.
        landing: Whether bytes may still be under way, so that decode has to look itself whether they have landed. Only
            where `Request.landing` was set.
    """

    room: Room
    generation: Generation
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    moved: Annotated[dict[Name, Moved], Few]
    chunks: Count
    granules: Annotated[dict[Name, tuple[Count, Count]], Few] = {}
    layers: tuple[int, int] | None = None
    digests: Annotated[dict[Name, Annotated[bytes, msgspec.Meta(max_length=64)]], Few] = {}
    transport: Annotated[str, msgspec.Meta(max_length=256)] = ""
    tokens: Tokens = 0
    landing: bool = False


class Received(Message, frozen=True, kw_only=True):
    """Decode has received everything from every source."""

    room: Room
    generation: Generation


class Failed(Message, frozen=True, kw_only=True):
    """A room failed on the sender's side. This says nothing about bytes in flight: see `Drained`.

    Attributes:
        room: The request.
        generation: Which use of the room id.
        reason: Why.
        met: Generation of the request that prefill's room met; 0 if none did. Only prefill sets it.
        ended_ms_ago: Milliseconds since the use ended, if decode could not tell it before; otherwise 0.
    """

    room: Room
    generation: Generation
    reason: Reason
    met: Generation = 0
    ended_ms_ago: Count = 0


class Drained(Message, frozen=True, kw_only=True):
    """No write of the sender for this use of the room is in flight, and the sender will start none.

    Attributes:
        room: The request.
        generation: Which use of the room id.
        met: As `Failed.met`.
    """

    room: Room
    generation: Generation
    met: Generation = 0


class Keep(Message, frozen=True, kw_only=True):
    """Decode will ask for a room, and wants prefill to keep the request's state until then.

    Attributes:
        room: The request.
        lease_ms: For how many milliseconds from now. Decode sends another one before this time is over.
    """

    room: Room
    lease_ms: Count = 0


class Note(Message, frozen=True, kw_only=True):
    """A message from a strategy's hook to its counterpart."""

    room: Room
    generation: Generation
    component: Name
    payload: Annotated[bytes, msgspec.Meta(max_length=64 << 10)]


class Inquire(Message, frozen=True, kw_only=True):
    """A rank of prefill asks another one of its own instance how a room stands there, and to tell every change of it.

    Attributes:
        room: The request.
    """

    room: Room


class Standing(Message, frozen=True, kw_only=True):
    """The answer to `Inquire`, repeated when it changes. Without an answer, the room is not open there.

    Attributes:
        room: The request.
        status: How far the room is there, as the number of a `statelink.Status`.
    """

    room: Room
    status: Annotated[int, msgspec.Meta(ge=0, le=4)] = 0


class Ping(Message, frozen=True, kw_only=True):
    """Asks the receiver for a sign of life: a `Pong`."""


class Pong(Message, frozen=True, kw_only=True):
    """The answer to `Ping`."""


class Unknown(Message, frozen=True, kw_only=True):
    """The sender does not know the link that spoke to it, or is not the link that was meant.

    The receiver then introduces itself again.

    Attributes:
        room: If this answers a request that was not taken: its room. Otherwise 0.
        generation: Which use of the room id.
    """

    room: Annotated[int, msgspec.Meta(ge=0)] = 0
    generation: Generation = 0


class Bye(Message, frozen=True, kw_only=True):
    """The sender closes its link, or suspends it.

    Attributes:
        drained: Whether none of its writes is in flight, and certainly none will land later.
        registration: `Handshake.registration` of the handshake to which this goodbye belongs.
        suspended: Whether the link comes back.
    """

    drained: bool = False
    registration: Count = 0
    suspended: bool = False


KINDS: dict[bytes, type[Message]] = {
    kind.__name__.lower().encode(): kind
    for kind in (
        Hello,
        Welcome,
        Refuse,
        Attach,
        Attached,
        Request,
        Chunk,
        Finished,
        Received,
        Failed,
        Drained,
        Keep,
        Note,
        Inquire,
        Standing,
        Ping,
        Pong,
        Unknown,
        Bye,
    )
}
