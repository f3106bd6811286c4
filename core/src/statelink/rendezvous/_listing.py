"""Asks a rendezvous server once for everything that is registered there."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from statelink import wire
from statelink.errors import PeerError

from ._directory import Instance, Rank
from ._registry import MAX_ENTRIES

if TYPE_CHECKING:
    from ._directory import DirectoryConfig

__all__ = ["listed"]

LOOK_SECONDS = 0.2
"""How long to wait for an answer before the connection is looked at."""
LISTING_SECONDS = 3.0
"""Seconds that the server may take for an answer."""


def listed(config: DirectoryConfig) -> list[Instance]:
    """All instances, as `Directory.instances`."""
    ranks = _ranks(config.address, config.keys)
    return [_of_listed(name, list(each)) for name, each in itertools.groupby(ranks, lambda each: each.instance)]


def _ranks(address: str, keys: wire.Keys | None) -> list[wire.Listed]:
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
    if not channel.send(question, str(server)):
        raise _silent(f"the rendezvous server at {server.address}", "the question could not be sent")
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


def _silent(who: str, cause: str, hint: str = "") -> PeerError:
    return PeerError(f"{who} does not answer", cause=cause, hint=hint, code="rendezvous.silent")
