"""What decode servers offer, as a rank of prefill knows it.

The scheduler asks while it builds a batch, so a thread waits for news from the bootstrap server, and the scheduler
reads a table. For each decode server that offers something, a room waits that nobody ever serves: it has the link
connect before the first load, and it ends when the server is lost or does not fit this one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink import Status
from statelink.backend import logger
from statelink.errors import StatelinkError

from ._offer_table import KEY_DIGITS, Known

if TYPE_CHECKING:
    from collections.abc import Callable

    from statelink import Link, Receiving

    from ._http import Bootstrap

__all__ = ["Catalogue", "Holder"]

log = logger("statelink.sglang")

WAIT_SECONDS = 2.0
"""Seconds for which the bootstrap server holds an answer without news back."""
ANSWER_SECONDS = 2.0
"""Seconds that it may take for one besides."""
FAILED_PAUSE_SECONDS = 0.5
"""Seconds until it is asked again after it did not answer."""
AGAIN_SECONDS = 10.0
"""Seconds until a decode server that was lost, or does not fit, is tried again."""

NEVER = 0.0, 0
"""Of a key that nobody offers."""


class Holder(NamedTuple):
    """Who holds the state up to the end of a page.

    Attributes:
        instance: The decode server.
        addresses: Where its ranks' links listen.
        pages: How many pages end there.
    """

    instance: str
    addresses: tuple[str, ...]
    pages: int


class _Server:
    """A decode server that offers something.

    Attributes:
        offers: When each of its offers ends, and the pages that its keys name.
        room: Waits for as long as the server is there.
        again: When to try a server anew whose room has ended.
        ready: Whether its ranks can be asked, as far as the link knows.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self.offers: dict[int, tuple[float, dict[str, int]]] = {}
        self.keys: dict[str, tuple[float, int]] = {}
        self.room: Receiving | None = None
        self.again = 0.0
        self.ready = False

    @property
    def there(self) -> bool:
        """Whether the server can be asked."""
        return self.ready and self.room is not None and self.room.status is not Status.FAILED

    def change(self, number: int, until: float, first: int, keys: Sequence[str]) -> None:
        """An offer is another one, or has ended if it has no keys."""
        end, before = self.offers.pop(number, (0.0, {}))
        for key in before:
            if self.keys.get(key, NEVER)[0] == end:  # else a later offer has it, too
                del self.keys[key]
        if keys:
            named = {key: place for place, key in enumerate(keys, first + 1) if key}
            self.offers[number] = until, named
            self.keys.update({key: (until, place) for key, place in named.items()})


class Catalogue:
    """Asks until it is closed.

    Args:
        bootstrap: The bootstrap server. It belongs to the thread from now on.
        link: Receives what is offered.
        rooms: Draws an id for a room, which no other rank uses.
    """

    def __init__(self, bootstrap: Bootstrap, link: Link, rooms: Callable[[], int]) -> None:
        self._bootstrap, self._link, self._rooms = bootstrap, link, rooms
        self._servers: dict[str, _Server] = {}
        """The thread replaces it, with all that is in it that changes; others read it."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statelink-catalogue", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more. Does not block."""
        self._closed.set()
        self._servers = {}

    # The scheduler's thread.

    def lengths(self, hashes: Sequence[str]) -> list[int]:
        """How many of the pages can be had, each possible number of them.

        Args:
            hashes: SGLang's hash of each page.
        """
        now, found = time.monotonic(), set[int]()
        for server in self._servers.values():
            keys = server.keys if server.there else {}
            found.update(n for n, each in enumerate(hashes, 1) if keys.get(each[:KEY_DIGITS], NEVER)[0] > now)
        return sorted(found)

    def holder(self, last: str) -> Holder | None:
        """Who holds the state up to the end of a page; ``None`` if nobody does any more."""
        now = time.monotonic()
        for name, server in sorted(self._servers.items()):
            until, pages = server.keys.get(last[:KEY_DIGITS], NEVER)
            if until > now and server.there:
                return Holder(name, server.addresses, pages)
        return None

    # The thread.

    def _run(self) -> None:
        name, version, failures = "", 0, 0
        while not self._closed.is_set():
            try:
                news = self._bootstrap.news(Known(name, version, WAIT_SECONDS), ANSWER_SECONDS)
                if not self._closed.is_set():
                    self._take(news, fresh=news["name"] != name)
                name, version, failures = news["name"], news["version"], 0
            except Exception as error:  # whatever it is, prefill computes what it does not load
                failures += 1
                if failures > 16 and failures.bit_count() == 1:
                    where = self._bootstrap.address
                    log.warning("the bootstrap server %s does not say what decode offers: %s", where, error)
                self._closed.wait(FAILED_PAUSE_SECONDS)

    def _take(self, news: dict[str, Any], *, fresh: bool) -> None:
        now, before = time.monotonic(), {} if fresh else self._servers
        servers = {}
        for name, addresses in news["servers"].items():
            known = before.get(name)
            servers[name] = known if known and known.addresses == tuple(addresses) else _Server(tuple(addresses))
        for server in {*self._servers.values()} - {*servers.values()}:
            if server.room is not None:
                server.room.abort("the decode server offers nothing any more")
        for name, number, left, first, keys in news["offers"]:
            if name in servers:
                # The scheduler may be reading: it sees the keys before or after the change.
                servers[name].change(number, now + left, first, keys if left > 0 else [])
        for name, server in servers.items():
            self._watch(name, server, now)
        if not self._closed.is_set():
            self._servers = servers

    def _watch(self, name: str, server: _Server, now: float) -> None:
        room = server.room
        if room is not None and room.status is Status.FAILED and not server.again:
            log.warning("what the decode server %s offers is not used: %s", name, room.reason)
            server.again = now + AGAIN_SECONDS
        if now >= server.again and (room is None or room.status is Status.FAILED):
            server.again, server.ready = 0.0, False
            try:
                server.room = self._link.receive(self._rooms(), list(server.addresses), 1, deadline=math.inf)
            except (StatelinkError, ValueError) as error:
                log.warning("what the decode server %s offers is not used: %s", name, error)
                server.again = now + AGAIN_SECONDS
        if not server.ready:
            ranks = [each for each in self._link.snapshot()["ranks"] if each["instance"] == name]
            server.ready = bool(ranks) and all(each["state"] == "ready" for each in ranks)
            if server.ready:
                log.info("what the decode server %s offers is used", name)
