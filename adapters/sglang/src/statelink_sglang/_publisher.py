"""Tells prefill servers what this decode server offers.

A thread for each prefill server that requests have named tells its bootstrap server each change, and at least once a
second that this server is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from statelink.backend import logger

from ._http import Bootstrap
from ._offer_table import MOST_KEYS

if TYPE_CHECKING:
    from ._offers import Offers, Told
    from ._proofs import KeyPair

__all__ = ["Publisher"]

log = logger("statelink.sglang")

ALIVE_SECONDS = 1.0
"""Most seconds between two messages to a server."""
LOOK_SECONDS = 0.5
"""Seconds between two looks at the prefill servers that are known."""
ANSWER_SECONDS = 2.0
"""Seconds that a server may take for an answer."""


class Publisher:
    """Tells for as long as it is not closed.

    Args:
        offers: What is told.
        instance: This server's name.
        addresses: Where the links of its ranks listen.
        pair: The keys of this rank.
        known: The addresses of bootstrap servers that answer. Called on a thread.
    """

    def __init__(
        self,
        offers: Offers,
        instance: str,
        addresses: Sequence[str],
        pair: KeyPair,
        known: Callable[[], Iterable[str]],
    ) -> None:
        self._offers, self._instance, self._addresses = offers, instance, list(addresses)
        self._pair, self._known = pair, known
        self._closed = threading.Event()
        self._told: dict[str, threading.Thread] = {}
        threading.Thread(target=self._look, name="statelink-offers", daemon=True).start()

    def close(self) -> None:
        """Tell nothing more. Does not block. Prefill forgets this server's offers soon."""
        self._closed.set()

    def _look(self) -> None:
        """Runs on a thread of its own."""
        while not self._closed.wait(LOOK_SECONDS):
            for address in list(self._known()):
                if not (thread := self._told.get(address)) or not thread.is_alive():
                    thread = threading.Thread(target=self._tell, args=(address,), name="statelink-offer", daemon=True)
                    self._told[address] = thread
                    thread.start()

    def _tell(self, address: str) -> None:
        """Runs on a thread of its own, until the server is not known any more."""
        bootstrap, server, told, failures = Bootstrap(address, self._pair), "", set[int](), 0
        while not self._closed.is_set() and address in list(self._known()):
            version, more, gone = self._offers.news(told)
            now, rest = _split(more)
            try:
                taken = bootstrap.put_offers(
                    {
                        "instance": self._instance,
                        "addresses": self._addresses,
                        "offers": [list(each) for each in now],
                        "gone": gone,
                    },
                    ANSWER_SECONDS,
                )
            except (OSError, ValueError) as error:
                failures += 1
                if failures.bit_count() == 1:
                    what = "the bootstrap server %s does not take what this server offers (%d times): %s"
                    log.warning(what, address, failures, error)
                time.sleep(ALIVE_SECONDS)
                continue
            failures = 0
            if taken != server:  # it was started anew, and knows only what it has just been told
                told, rest, server = set(), rest or bool(server), taken
            told.difference_update(gone)
            told.update(each.number for each in now)
            if not rest:
                self._offers.wait(version, ALIVE_SECONDS)


def _split(more: list[Told]) -> tuple[list[Told], bool]:
    """As many offers as one message may have, and whether there are others."""
    keys = 0
    for place, each in enumerate(more):
        keys += len(each.keys)
        if keys > MOST_KEYS:
            return more[:place], True
    return more, False
