"""What a rank registers in etcd, under which key, and when an instance is complete. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple
from urllib.parse import quote

import msgspec

from statelink.errors import ConfigError
from statelink.rendezvous import MAX_RANKS, Endpoint, decode_json, parse_endpoint

__all__ = ["Record", "Seen", "folder_of", "key_of", "link_of", "look", "root_of"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a rank's key, as JSON. A reader ignores fields that it does not know.

    Attributes:
        link: Link name of the process. It contains its incarnation.
        address: ``tcp://host:port``, and its public key if it has one.
        ranks: Ranks of its instance.
    """

    link: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class Seen(NamedTuple):
    """What is registered of an instance.

    Attributes:
        addresses: The addresses of all ranks, in order of rank; ``None`` unless all are there and agree.
        present: Number of ranks that are registered.
        ranks: Number of ranks, as the first of them says; 0 if none is registered.
        wrong: What is wrong with the entries; empty if nothing is.
    """

    addresses: tuple[Endpoint, ...] | None
    present: int
    ranks: int
    wrong: str = ""

    @property
    def words(self) -> str:
        """What is registered, as a clause."""
        if self.wrong:
            return self.wrong
        return f"{self.present} of its {self.ranks} ranks are" if self.ranks else "nobody of this name is"


def root_of(prefix: str) -> str:
    """What the keys of all instances begin with."""
    return f"{prefix}/instances/"


def folder_of(prefix: str, instance: str) -> str:
    """What the keys of an instance's ranks begin with."""
    return f"{root_of(prefix)}{quote(instance, safe='')}/"


def key_of(prefix: str, instance: str, rank: int) -> str:
    """The key of a rank."""
    return f"{folder_of(prefix, instance)}{rank:04d}"


def link_of(value: bytes) -> str:
    """The link that wrote an entry; empty if no link did."""
    try:
        return decode_json(value, Record).link
    except ValueError:
        return ""


def look(entries: Mapping[str, bytes]) -> Seen:
    """Put together what the keys of one instance say.

    Args:
        entries: Key to value.
    """
    found: dict[int, tuple[Endpoint, int]] = {}
    for key, value in entries.items():
        name = key.rpartition("/")[2]
        try:
            record = decode_json(value, Record)
            rank = int(name)
            found[rank] = parse_endpoint(record.address), record.ranks
        except (ValueError, ConfigError) as error:
            return Seen(None, len(entries), 0, f"the entry of rank {name:.16} is not one of Statelink ({error!s:.80})")
    if not found:
        return Seen(None, 0, 0)
    sizes = {ranks: rank for rank, (_, ranks) in sorted(found.items(), reverse=True)}
    first = found[min(found)][1]
    if len(sizes) > 1:
        said = ", ".join(f"rank {rank} that there are {size}" for size, rank in sorted(sizes.items()))
        return Seen(None, len(found), first, f"its ranks disagree about their number: {said}; they are")
    complete = sorted(found) == list(range(first))
    return Seen(tuple(found[rank][0] for rank in sorted(found)) if complete else None, len(found), first)
