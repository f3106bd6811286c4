"""Every message that two links exchange.

A message is two frames: its kind, and a msgpack map of the fields below. Unknown fields are ignored and missing ones
have defaults, so that a field can be added; an unknown kind is counted and dropped. ``sender`` and ``to`` are link
names, which are unique among all processes ever started: what is meant for an earlier incarnation is never mistaken.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from statelink.backend import MAX_PREPARED, Moved
from statelink.errors import Reason
from statelink.plan import Assignment
from statelink.state import Inventory, StateType

__all__ = [
    "KINDS",
    "MAX_UNMET",
    "Accepted",
    "Attach",
    "Attached",
    "Bye",
    "Chunk",
    "Drained",
    "Failed",
    "Finished",
    "Handshake",
    "Hello",
    "ItemList",
    "Message",
    "Note",
    "Ping",
    "Pong",
    "ProcessId",
    "Refuse",
    "Request",
    "Unknown",
    "Unmet",
    "Welcome",
]

PROTOCOL = (1, 1)
"""Lowest and highest protocol version that this core speaks."""
MAX_DESCRIPTOR = 8 << 20
"""Most bytes of what a backend says of how it is reached."""
MAX_INDICES = 1 << 22
"""Most indices of one request, of all of its components together."""
MAX_KINDS = 1024
"""Most state types, operations and components that a message names."""

Name = Annotated[str, msgspec.Meta(max_length=512)]
Room = Annotated[int, msgspec.Meta(ge=1)]  # the encoding itself has no integer above 2^64 - 1
Generation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Few = msgspec.Meta(max_length=MAX_KINDS)


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every message carries.

    Attributes:
        sender: Link name of the process that sent it.
        to: Link name of the process it is meant for; empty where that is not known yet.
    """

    sender: Name
    to: Name = ""


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """Which process of a host a link runs in: enough to notice its end from another process of the same host.

    Attributes:
        pid: Its id, in its own pid namespace.
        start: When it started, in ticks since boot; tells it from a later process with its id.
        pid_namespace: Its pid namespace.
        boot: Id of its kernel's boot.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    start: Count
    pid_namespace: Count
    boot: Annotated[str, msgspec.Meta(max_length=64)]


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """Who a link is and what it holds; exchanged in the handshake.

    Attributes:
        link: Link name; holds the incarnation.
        protocol: Lowest and highest protocol version.
        version: Version of the core, for messages to people.
        role: ``prefill`` or ``decode``.
        backend: Name of the backend.
        ops: Operations that it offers.
        kinds: Definitions of the state types in the inventory.
        strategies: Component to the name of its strategy.
        descriptor: What the backend needs to reach this side.
        inventory: What this rank holds, addresses included.
        process: Which process it runs in, where that is known.
        verify: What both sides compare before success: ``off`` or ``digest``.
    """

    link: Name
    protocol: tuple[int, int]
    version: Name
    role: Name
    backend: Name
    ops: Annotated[tuple[Name, ...], Few]
    kinds: Annotated[tuple[StateType, ...], Few]
    strategies: Annotated[dict[Name, Name], Few]
    descriptor: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTOR)]
    inventory: Inventory
    process: ProcessId | None = None
    verify: Name = "off"


class ItemList(msgspec.Struct, frozen=True):
    """Indices of one component, as a little-endian array.

    Attributes:
        first: Number of the first item in the sequence.
        ids: int64, little endian.
    """

    first: Tokens
    ids: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_INDICES)]


class Hello(Message, frozen=True, kw_only=True):
    """A link introduces itself, and asks the other to.

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
    """Decode tells a source its part.

    Attributes:
        assignment: What it writes for this destination.
        destinations: Decode ranks that will ask it for each room.
        digest: Decode's digest of the compiled plan.
        same_host: Whether decode sees the source's process on its own host, at the address that it dialled.
    """

    assignment: Assignment
    destinations: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    same_host: bool = False


class Attached(Message, frozen=True, kw_only=True):
    """The source has checked its part and can reach the destination.

    Attributes:
        digest: Of the plan that it compiled.
        transport: What its backend says carries the bytes.
    """

    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    transport: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Unmet(msgspec.Struct, frozen=True):
    """An earlier use of a room id that ended on a decode rank, and of which prefill may not have opened its side.

    Attributes:
        generation: Which; 0 for any number of uses that are not known one by one.
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
        generation: Drawn by this decode rank for this use of the room id.
        tokens: N; both sides must agree.
        prefix: P, the positions that decode already holds.
        items: Where each component belongs in decode's memory.
        prepared: What each receive hook prepared for this writer.
        elsewhere: Components whose receive hook wants the bytes somewhere else than in decode's items.
        attempt: Which use of the room id this is, as the engines of both sides say.
        lifetime_ms: Milliseconds that this use may take on decode, from its beginning to its deadline.
        unmet: Earlier uses of the same room and attempt, in the order in which they ended.
    """

    room: Room
    generation: Generation
    tokens: Tokens
    prefix: Tokens
    items: Annotated[dict[Name, ItemList], Few] = {}
    prepared: Annotated[dict[Name, Annotated[bytes, msgspec.Meta(max_length=MAX_PREPARED)]], Few] = {}
    elsewhere: Annotated[list[Name], Few] = []
    attempt: Attempt = 0
    lifetime_ms: Count = 0
    unmet: Annotated[tuple[Unmet, ...], msgspec.Meta(max_length=MAX_UNMET)] = ()


class Chunk(Message, frozen=True, kw_only=True):
    """One push is visible at the destination.

    Attributes:
        room: The request.
        generation: Which use of the room id.
        number: Number of the push, from 0.
        granules: Per component ``[first, last)`` granules that moved.
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
    """A source's last word on a room: everything it was assigned has been written.

    Attributes:
        room: The request.
        generation: Which use of the room id.
        digest: The source's digest of the plan.
        moved: What it moved, per component.
        chunks: How many pushes that took.
        digests: Per component, the digest of what it moved, where both sides verify.
        transport: What its backend says carried the bytes.
    """

    room: Room
    generation: Generation
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    moved: Annotated[dict[Name, Moved], Few]
    chunks: Count
    digests: Annotated[dict[Name, Annotated[bytes, msgspec.Meta(max_length=64)]], Few] = {}
    transport: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Accepted(Message, frozen=True, kw_only=True):
    """Decode has everything from every source."""

    room: Room
    generation: Generation


class Failed(Message, frozen=True, kw_only=True):
    """A room ended in failure on the sender's side. Says nothing about bytes in flight: see `Drained`.

    Attributes:
        room: The request.
        generation: Which use of the room id.
        reason: Why.
        attempt: Which use of the room id this is, as the engines of both sides say; decode says it.
        met: The use of decode that prefill's room belonged to, if there was one; prefill says it.
    """

    room: Room
    generation: Generation
    reason: Reason
    attempt: Attempt = 0
    met: Generation = 0


class Drained(Message, frozen=True, kw_only=True):
    """No write of the sender for this use of the room is in flight, and none will start.

    Attributes:
        room: The request.
        generation: Which use of the room id.
        met: As `Failed.met`.
    """

    room: Room
    generation: Generation
    met: Generation = 0


class Note(Message, frozen=True, kw_only=True):
    """A strategy's hook speaks to its counterpart."""

    room: Room
    generation: Generation
    component: Name
    payload: Annotated[bytes, msgspec.Meta(max_length=64 << 10)]


class Ping(Message, frozen=True, kw_only=True):
    """Are you there?"""


class Pong(Message, frozen=True, kw_only=True):
    """I am."""


class Unknown(Message, frozen=True, kw_only=True):
    """The sender knows nothing of the link that spoke, or is not the one that was spoken to: introduce yourself.

    Attributes:
        room: The room of the request that this answers, which nobody took; 0 for other messages.
        generation: Which use of the room id.
    """

    room: Annotated[int, msgspec.Meta(ge=0)] = 0
    generation: Generation = 0


class Bye(Message, frozen=True, kw_only=True):
    """The sender closes.

    Attributes:
        drained: Whether none of its writes is in flight, and it is certain that none will land later.
    """

    drained: bool = False


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
        Accepted,
        Failed,
        Drained,
        Note,
        Ping,
        Pong,
        Unknown,
        Bye,
    )
}
