"""What decode servers offer to a prefill server, as its bootstrap server knows it.

Decode's ranks put it there, and prefill's ranks wait there for news. It lives in the main process of prefill.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from typing import Any, NamedTuple

__all__ = ["KEY_DIGITS", "MOST_KEYS", "NEWS_PATH", "OFFERS_PATH", "SILENT_SECONDS", "Known", "OfferTable", "Offered"]

OFFERS_PATH = "/statelink/offers"
"""Decode puts what it offers here."""
NEWS_PATH = "/statelink/offers/news"
"""Prefill's ranks put what they know of it here, and get what they do not know."""

SILENT_SECONDS = 5.0
"""Seconds for which the offers of a server are listed after it last said something. It says something each second."""
MOST_KEYS = 20_000
"""Most keys in one message of a server, and about as many in an answer."""
MOST_KEPT_KEYS = 1 << 20
"""Most keys that are kept of a server. Its oldest offers go first: what is not listed is computed."""
MOST_SERVERS = 256
"""Most servers whose offers are kept."""
KEY_DIGITS = 24
"""Characters of SGLang's hash that are told as a key. Both servers state the whole hash to their links."""
MOST_ADDRESSES, LONGEST_NAME = 4096, 512
LONGEST_WAIT_SECONDS = 2.0
"""Seconds for which an answer without news is held back."""


class Offered(NamedTuple):
    """A message of a decode server.

    Attributes:
        instance: Its name.
        addresses: Where the links of its ranks listen that send what it offers.
        offers: For each offer its number, the seconds for which it may be asked for, how many pages are before its
            keys, and its keys.
        gone: Numbers of offers that have ended.
    """

    instance: str
    addresses: list[str]
    offers: list[tuple[int, float, int, list[str]]]
    gone: list[int]

    @classmethod
    def read(cls, given: dict[str, Any]) -> Offered:
        """A message from decoded JSON, whose version was looked at.

        Raises:
            ValueError: The JSON is no such message.
        """
        if {*given} != {"schema", *cls._fields}:
            raise ValueError(f"offers are described by {', '.join(cls._fields)}")
        told = cls(*(given[each] for each in cls._fields))
        if not _is_name(told.instance) or not _all(told.addresses, _is_name) or len(told.addresses) > MOST_ADDRESSES:
            raise ValueError("a server is described by its name and its addresses")
        if not _all(told.gone, _is_number) or not _all(told.offers, _is_offer):
            raise ValueError("an offer is described by a number, seconds, pages and keys")
        if sum(len(keys) for *_, keys in told.offers) > MOST_KEYS:
            raise ValueError(f"at most {MOST_KEYS} keys are told at once")
        return told


class Known(NamedTuple):
    """What a rank of prefill knows.

    Attributes:
        name: The `name` of the table that it asked last; empty for none.
        since: The version of that table that it knows; 0 for none.
        seconds: How long it waits for news.
    """

    name: str
    since: int
    seconds: float

    @classmethod
    def read(cls, given: dict[str, Any]) -> Known:
        """A message from decoded JSON, whose version was looked at.

        Raises:
            ValueError: The JSON is no such message.
        """
        kinds = {"name": str, "since": int, "seconds": float}
        if {*given} != {"schema", *kinds} or not all(type(given[field]) is kind for field, kind in kinds.items()):
            raise ValueError(f"offers are asked for with {', '.join(kinds)}")
        return cls(*(given[field] for field in kinds))


def _all(given: Any, fits: Any) -> bool:
    return type(given) is list and all(map(fits, given))


def _is_name(given: Any) -> bool:
    return type(given) is str and 0 < len(given) <= LONGEST_NAME


def _is_number(given: Any) -> bool:
    return type(given) is int and 0 <= given < 1 << 62


def _is_offer(given: Any) -> bool:
    if type(given) is not list or len(given) != 4:
        return False
    number, left, first, keys = given
    return (
        _is_number(number)
        and isinstance(left, (int, float))
        and 0 <= left < 1e9
        and _is_number(first)
        and _all(keys, lambda key: type(key) is str and len(key) <= KEY_DIGITS)
    )


class _Source:
    """What one start of a decode server offers."""

    def __init__(self, owner: str) -> None:
        self.owner, self.until = owner, 0.0
        self.addresses: list[str] = []
        self.offers: OrderedDict[int, tuple[int, float, int, list[str]]] = OrderedDict()
        """For each number: the version of its last change, when it ends, the pages before its keys, and its keys."""
        self.keys = 0


class OfferTable:
    """Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._servers: dict[str, _Source] = {}
        self._version = 0
        self.name = secrets.token_hex(8)
        """Another one after each start of the bootstrap server, which then knows nothing."""

    def put(self, told: Offered, owner: str) -> str:
        """Take a message. Returns why it is refused; empty if it is not.

        Args:
            told: The message.
            owner: The key whose holder says it.
        """
        now = time.monotonic()
        with self._changed:
            for name in [name for name, each in self._servers.items() if each.until < now]:
                del self._servers[name]
            server = self._servers.get(told.instance)
            if server is None:
                if len(self._servers) >= MOST_SERVERS:
                    return f"{MOST_SERVERS} servers make offers already"
                server = self._servers[told.instance] = _Source(owner)
            if server.owner != owner:
                return f"{told.instance:.80} makes offers with another key"
            server.until, server.addresses = now + SILENT_SECONDS, told.addresses
            self._version += 1
            for number in told.gone:
                self._change(server, number, now, 0, [])
            for number, left, first, keys in told.offers:
                self._change(server, number, now + left, first, keys)
            while server.keys > MOST_KEPT_KEYS:
                self._change(server, next(iter(server.offers)), now, 0, [])
            self._changed.notify_all()
        return ""

    def _change(self, server: _Source, number: int, until: float, first: int, keys: list[str]) -> None:
        before = server.offers.pop(number, None)
        server.keys += len(keys) - (0 if before is None else len(before[3]))
        if before is not None or keys:
            server.offers[number] = self._version, until, first, keys

    def news(self, known: Known) -> dict[str, Any]:
        """What a rank does not know yet, once there is something, or after some time."""
        since = known.since if known.name == self.name else 0
        with self._changed:
            if since:
                self._changed.wait_for(lambda: self._version != since, min(known.seconds, LONGEST_WAIT_SECONDS))
            now, found, keys = time.monotonic(), [], 0
            servers = {name: each for name, each in self._servers.items() if each.until >= now}
            changes = sorted(
                (version, instance, number)
                for instance, server in servers.items()
                for number, (version, *_) in server.offers.items()
                if version > since
            )
            version = self._version
            for at, instance, number in changes:
                if keys > MOST_KEYS and at > version:
                    break
                _, until, first, listed = servers[instance].offers[number]
                found.append([instance, number, round(max(0.0, until - now), 3), first, listed if until > now else []])
                keys += len(listed)
                if keys > MOST_KEYS:
                    version = at  # all of this version, and the rest with the next question
            for server in servers.values():  # what has ended needs no place any more, once everybody could hear of it
                for number in [n for n, (_, until, _, _) in server.offers.items() if until < now - SILENT_SECONDS]:
                    server.keys -= len(server.offers.pop(number)[3])
        return {
            "name": self.name,
            "version": version,
            "servers": {name: each.addresses for name, each in servers.items()},
            "offers": found,
        }
