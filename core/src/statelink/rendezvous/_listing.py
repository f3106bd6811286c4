"""Asks a directory once for everything that is registered there."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from statelink import wire
from statelink._json import decode_json
from statelink.errors import PeerError

from ._cluster import Cluster, is_etcd
from ._gateway import EtcdRefusedError, EtcdSilentError, Gateway, Waits, end_of, key_in, unpack
from ._records import Record, look, root_of
from ._registry import MAX_ENTRIES

if TYPE_CHECKING:
    from statelink.config import LinkConfig

__all__ = ["Instance", "Rank", "list_instances"]

LOOK_SECONDS = 0.2
"""How long to wait for an answer before the connection is looked at."""
LISTING_SECONDS = 3.0
"""Seconds that the server may take for an answer."""
PAGE = 1000
"""Keys that one question to etcd asks for."""
MOST_LISTED_BYTES = 128 << 20
"""Most bytes of all keys and values in etcd: 2 KiB for each rank."""


class Rank(NamedTuple):
    """A registered rank.

    Attributes:
        rank: Its number.
        address: ``tcp://host:port``, and its public key if it has one.
        link: Link name of its process.
    """

    rank: int
    address: str
    link: str


class Instance(NamedTuple):
    """What is registered of an instance.

    Attributes:
        name: Its name.
        ranks: Number of its ranks, as the first of them says; 0 if no entry can be read.
        registered: The ranks that are registered, in order.
        wrong: What is wrong with the entries, as a clause; empty if nothing is.
    """

    name: str
    ranks: int
    registered: tuple[Rank, ...]
    wrong: str = ""

    @property
    def missing(self) -> list[int]:
        """The ranks that are not registered."""
        present = {each.rank for each in self.registered}
        return [rank for rank in range(self.ranks) if rank not in present]

    @property
    def complete(self) -> bool:
        """Whether links find the instance."""
        return not self.wrong and self.ranks > 0 and not self.missing


def list_instances(config: LinkConfig, *, keys: wire.Keys | None, page: int = PAGE) -> list[Instance]:
    """Ask the directory of ``config.rendezvous`` for all instances, in order of name. Blocks, for seconds at most.

    Ranks that come or go meanwhile may be in the list or not.

    Args:
        config: A link's configuration. Nothing is registered.
        keys: Keys for a rendezvous server. Etcd has users and certificates instead.
        page: Keys that one question to etcd asks for.

    Raises:
        ConfigError: The address, a key, a file or an option cannot be used.
        PeerError: The directory does not answer, or refuses.
    """
    if is_etcd(config.rendezvous):
        cluster = Cluster.of(config.rendezvous, config.etcd, insecure=config.insecure)
        by_folder = itertools.groupby(asyncio.run(_entries(cluster, page)), lambda pair: pair[0].partition("/")[0])
        return sorted(_of_entries(unquote(folder), dict(pairs)) for folder, pairs in by_folder)
    listed = _listed(config.rendezvous, keys)
    return [_of_listed(name, list(each)) for name, each in itertools.groupby(listed, lambda each: each.instance)]


# The rendezvous server.


def _listed(address: str, keys: wire.Keys | None) -> list[wire.Listed]:
    server = wire.parse_endpoint(address)
    name = wire.link_name("list", keys)
    channel = wire.Channel(name, "", advertise="", keys=keys, insecure=False, kinds=wire.RENDEZVOUS_KINDS)
    try:
        channel.dial(server)
        found: list[wire.Listed] = []
        while len(found) < MAX_ENTRIES:
            last = (found[-1].instance, found[-1].rank) if found else ("", -1)
            question = wire.Browse(sender=name, instance=last[0], rank=max(0, last[1]))
            listed = _ask(channel, question, server)
            if not listed:
                break
            places = [last, *((each.instance, each.rank) for each in listed)]
            if any(before >= after for before, after in itertools.pairwise(places)):
                raise _silent(f"the rendezvous server at {server.address}", "its answer is out of order")
            found += listed
        return found
    finally:
        channel.close()


def _ask(channel: wire.Channel, question: wire.Browse, server: wire.Endpoint) -> tuple[wire.Listed, ...]:
    channel.send(question, str(server))
    end = time.monotonic() + LISTING_SECONDS
    while (left := end - time.monotonic()) > 0:
        for message, _ in channel.receive(min(left, LOOK_SECONDS)):
            if isinstance(message, wire.Browsed):
                return message.listed
        channel.trouble(str(server))  # it finds out by and by why nobody answers
    trouble = channel.trouble(str(server)) or wire.Trouble.MUTE
    raise _silent(f"the rendezvous server at {server.address}", trouble.what, channel.hint(trouble))


def _of_listed(name: str, listed: list[wire.Listed]) -> Instance:
    ranks = tuple(Rank(each.rank, each.address, each.link) for each in listed)
    return Instance(name, listed[0].ranks, ranks)


# Etcd.


async def _entries(cluster: Cluster, page: int) -> list[tuple[str, bytes]]:
    """All keys, in order and without what all begin with, and their values."""
    gateway, where = Gateway(cluster.members, cluster.login, Waits()), f"etcd at {cluster.where}"
    root = root_of(cluster.prefix)
    end, found, key = end_of(root), list[tuple[str, bytes]](), root.encode()
    nbytes = 0
    try:
        while True:
            answer = await gateway.range(key, end, limit=page)
            for pair in answer.kvs:
                if unpack(pair.key) < key:
                    raise _silent(where, "its answer is out of order")
                key, value = unpack(pair.key) + b"\0", unpack(pair.value)
                nbytes += len(key) + len(value)
                found.append((key_in(pair).removeprefix(root), value))
            if len(found) > MAX_ENTRIES or nbytes > MOST_LISTED_BYTES:
                raise _silent(where, f"it lists more than {MAX_ENTRIES} ranks, or {MOST_LISTED_BYTES} bytes")
            if not answer.more or not answer.kvs:
                return found
    except EtcdSilentError as error:
        raise _silent(where, str(error), error.hint) from error
    except EtcdRefusedError as error:
        hint = "see 'etcd' in the configuration"
        raise PeerError(f"{where} refuses to list", cause=str(error), hint=hint, code="rendezvous.refused") from error
    finally:
        await gateway.close()


def _of_entries(name: str, entries: dict[str, bytes]) -> Instance:
    seen = look(entries)
    return Instance(name, seen.ranks, tuple(_ranks(entries.items())), seen.wrong)


def _ranks(entries: Iterable[tuple[str, bytes]]) -> Iterator[Rank]:
    """The entries that can be read."""
    for key, value in entries:
        try:
            record = decode_json(value, Record)
            yield Rank(int(key.rpartition("/")[2]), record.address, record.link)
        except ValueError:
            continue


def _silent(who: str, cause: str, hint: str = "") -> PeerError:
    return PeerError(f"{who} does not answer", cause=cause, hint=hint, code="rendezvous.silent")
