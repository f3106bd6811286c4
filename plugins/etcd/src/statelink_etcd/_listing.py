"""Asks etcd once for everything that is registered there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote

from statelink.errors import PeerError
from statelink.rendezvous import Instance, Rank, decode_json

from ._gateway import EtcdRefusedError, EtcdSilentError, Gateway, Waits, end_of, key_in, unpack
from ._records import Record, look, root_of

if TYPE_CHECKING:
    from ._cluster import Cluster

__all__ = ["instances"]

MOST_LISTED = 65536
"""Most ranks of all instances together."""
PAGE = 1000
"""Keys that one question to etcd asks for."""
MOST_LISTED_BYTES = 128 << 20
"""Most bytes of all keys and values in etcd: 2 KiB for each rank."""


def instances(cluster: Cluster, *, page: int = PAGE) -> list[Instance]:
    """All instances, as `Directory.instances`.

    Args:
        cluster: The cluster.
        page: Keys that one question asks for.
    """
    by_folder = itertools.groupby(asyncio.run(_entries(cluster, page)), lambda pair: pair[0].partition("/")[0])
    return sorted(_of_entries(unquote(folder), dict(pairs)) for folder, pairs in by_folder)


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
            if len(found) > MOST_LISTED or nbytes > MOST_LISTED_BYTES:
                raise _silent(where, f"it lists more than {MOST_LISTED} ranks, or {MOST_LISTED_BYTES} bytes")
            if not answer.more or not answer.kvs:
                return found
    except EtcdSilentError as error:
        raise _silent(where, str(error), error.hint) from error
    except EtcdRefusedError as error:
        hint = "see 'rendezvous_options' in the configuration"
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
