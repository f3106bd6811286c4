"""Messages between a link and the rendezvous server."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ._messages import Bye, Message, Name, Refuse

__all__ = [
    "MAX_LISTED",
    "MAX_RANKS",
    "RENDEZVOUS_KINDS",
    "Browse",
    "Browsed",
    "Listed",
    "Register",
    "Registered",
    "Resolve",
    "Resolved",
]

MAX_RANKS = 4096
"""Most ranks of one instance."""
MAX_LISTED = 1024
"""Most ranks that one answer lists."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]


class Register(Message, frozen=True, kw_only=True):
    """A rank registers its address. It does so again before the entry expires.

    Attributes:
        instance: Name of its instance.
        rank: Its rank.
        ranks: Ranks of the instance.
        address: ``tcp://host:port``, and its public key if it has one.
    """

    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    address: Name

    def __post_init__(self) -> None:
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")


class Registered(Message, frozen=True, kw_only=True):
    """The answer to `Register`.

    Attributes:
        lifetime: Seconds after which the entry expires.
    """

    lifetime: Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Resolve(Message, frozen=True, kw_only=True):
    """Ask for the addresses of an instance's ranks."""

    instance: Name


class Resolved(Message, frozen=True, kw_only=True):
    """The answer to `Resolve`.

    Attributes:
        instance: Name of the instance.
        addresses: Addresses of all ranks, in order of rank; empty while one is missing.
        present: Number of ranks that are registered.
        ranks: Number of ranks of the instance; 0 if none is registered.
        early: Whether the server has just started, so that a rank that is there may not have registered again yet.
    """

    instance: Name
    addresses: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    present: Count = 0
    ranks: Count = 0
    early: bool = False


class Browse(Message, frozen=True, kw_only=True):
    """Ask for the next registered ranks, in order of instance and rank.

    Attributes:
        instance: The instance of the last rank that the sender knows; empty for the first question.
        rank: That rank.
    """

    instance: Name = ""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)] = 0


class Listed(msgspec.Struct, frozen=True):
    """A registered rank.

    Attributes:
        instance: Name of its instance.
        rank: Its rank.
        ranks: Ranks of the instance, as it says.
        address: Its address.
        link: Link name of the process.
    """

    instance: Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    address: Name
    link: Name


class Browsed(Message, frozen=True, kw_only=True):
    """The answer to `Browse`.

    Attributes:
        listed: The next ranks, in order; empty if there are no more.
    """

    listed: Annotated[tuple[Listed, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()


RENDEZVOUS_KINDS: dict[bytes, type[Message]] = {
    kind.__name__.lower().encode(): kind
    for kind in (Register, Registered, Resolve, Resolved, Browse, Browsed, Refuse, Bye)
}
