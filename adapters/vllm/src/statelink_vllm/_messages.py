"""What the two sides of the connector tell each other. vLLM carries it, pickled from process to process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = ["Address", "Chunk", "FromWorker", "Keep", "Open", "Receive", "Send", "Tables", "ToWorker"]

Tables = tuple[list[int], ...]
"""A request's blocks of each group that is moved, by position from token 0; 0 where vLLM has freed the block."""


@dataclass
class Address(KVConnectorHandshakeMetadata):
    """Where a worker's link listens."""

    address: str


@dataclass
class Send:
    """A request that is computed, and whose blocks are held until its state has been sent.

    Attributes:
        room: The id of the request between the servers.
        tokens: Number of tokens whose state is sent.
        tables: Its blocks; empty where there is nothing to send, and decode is only told so.
        why: Why nothing is sent.
        content: Which request it is.
        running: Whether a step under way may still compute the last of these tokens.
        shorter: The same for fewer of the request's first tokens. The other server takes one of all these.
        hold: For how many seconds the state is held for a turn of the conversation to come; 0 if it is for decode.
    """

    room: int
    tokens: int
    tables: Tables = ()
    why: str = ""
    content: bytes = b""
    running: bool = False
    shorter: tuple[Send, ...] = ()
    hold: float = 0.0


@dataclass
class Open:
    """A request whose prompt begins to be computed, and of which parts may be sent before its end.

    Attributes:
        room: The id of the request between the servers.
        tokens: Number of tokens whose state is sent.
        content: Which request it is.
    """

    room: int
    tokens: int
    content: bytes


@dataclass
class Chunk:
    """A part of such a request, which this step completes. Its blocks are held until it has been sent.

    Attributes:
        number: Its number in the request, from 0.
        first: Its first token.
        last: The token behind its last one.
        tables: Their blocks, of the groups of layers whose state stays as it is once it is computed.
        final: Whether nothing of the request is left to send after it.
        others: If it is final, the request's blocks of the other groups, by position from token 0.
    """

    number: int
    first: int
    last: int
    tables: Tables
    final: bool = False
    others: Tables = ()


@dataclass
class Receive:
    """A request that needs state from another server.

    Attributes:
        room: The id of the request between the servers.
        peer: The prefill instance: its name, or the addresses of its ranks.
        tokens: Number of tokens whose state arrives, those of the prefix included.
        prefix: Number of tokens that are here already.
        tables: Its blocks; empty where nothing is received, and prefill is only told so.
        why: Why nothing is received.
        content: Which request it is; empty where nothing is received.
        answered: Which request prefill's answer was for; empty if the answer did not say.
        history: Whether this is what another server has of a request that had ended before. It has the room, or never
            will.
    """

    room: int
    peer: str | tuple[str, ...]
    tokens: int
    prefix: int = 0
    tables: Tables = ()
    why: str = ""
    content: bytes = b""
    answered: bytes = b""
    history: bool = False

    @property
    def for_another(self) -> bool:
        """Whether prefill's answer was for another request, so that the room is not this one's."""
        return bool(self.answered) and self.answered != self.content


@dataclass
class Keep:
    """A request that waits for blocks here, and whose state prefill has to keep.

    Attributes:
        room: The id of the request between the servers.
        peer: As `Receive.peer`.
        seconds: For how long from now.
    """

    room: int
    peer: str | tuple[str, ...]
    seconds: float


@dataclass
class ToWorker(KVConnectorMetadata):
    """What happens in one step, by vLLM's id of the request.

    Attributes:
        send: Requests to send.
        receive: Requests to receive.
        abort: Requests that are received and were given up.
        repeated: Requests that a router has sent again, and whose state nobody will ask for.
        keep: Requests that will be received later.
        extend: Requests that are held for a turn to come, and for how many seconds more; 0: no longer.
        again: Requests whose state has not come, and which the worker has to report to vLLM in this step.
        open: Requests of which parts may be sent before their end.
        chunks: Such parts.
        withdraw: Requests of which nothing is sent any more that has not begun to be sent.
        unclaimed: Requests to give up, and why, unless decode has said a word of them. With an empty reason, ranks only
            say whether it has.
        addresses: Addresses of the links of all ranks of this server. Sent once, before the first request.
        idle: Whether no model runs in this step, and no other rank waits for its end.
    """

    send: dict[str, Send] = field(default_factory=dict)
    receive: dict[str, Receive] = field(default_factory=dict)
    abort: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    keep: dict[str, Keep] = field(default_factory=dict)
    extend: dict[str, float] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    open: dict[str, Open] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    withdraw: set[str] = field(default_factory=set)
    unclaimed: dict[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    idle: bool = False

    def __bool__(self) -> bool:
        """Whether a worker has anything to do."""
        early = self.open or self.chunks or self.withdraw
        own = self.send or self.receive or self.abort or self.repeated or self.keep or self.extend or self.again
        return bool(own or self.addresses or early or self.unclaimed)


@dataclass
class FromWorker(KVConnectorWorkerMetadata):
    """What ranks say of requests, by vLLM's id.

    Attributes:
        unquiet: How many ranks reported it as failed, while something may still be written.
        quiet: How many of these ranks have proven that nothing is written any more.
        lacking: Blocks that lack tokens in front of a window; see `Group.lacking`.
        settled: For a request and the number of a chunk, how many ranks do not read it any more.
        claimed: Those of `ToWorker.unclaimed` of which decode has said a word.
    """

    unquiet: Counter[str] = field(default_factory=Counter)
    quiet: Counter[str] = field(default_factory=Counter)
    lacking: dict[str, set[int]] = field(default_factory=dict)
    settled: Counter[tuple[str, int]] = field(default_factory=Counter)
    claimed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FromWorker:
        """What two ranks say together."""
        assert isinstance(other, FromWorker)
        names = self.lacking.keys() | other.lacking.keys()
        lacking = {name: self.lacking.get(name, set()) | other.lacking.get(name, set()) for name in names}
        settled = self.settled + other.settled
        claimed = self.claimed | other.claimed
        return FromWorker(self.unquiet + other.unquiet, self.quiet + other.quiet, lacking, settled, claimed)

    def __bool__(self) -> bool:
        """Whether a rank says anything."""
        return bool(self.unquiet or self.quiet or self.lacking or self.settled or self.claimed)
