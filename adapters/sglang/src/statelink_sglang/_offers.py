"""What decode's prefix cache keeps for prefill, and until when.

Each offer is a node of SGLang's tree with the way to it. SGLang locks the node while an offload of it is not complete,
and the lock pins the memory of the way. So an offer is an offload that completes when its lease is over. Offloads
complete in the order in which they began, on all ranks of a server at once.

An offer is not told to prefill any more for some time before it ends, so that prefill asks for nothing that has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ._offer_table import KEY_DIGITS, MOST_KEYS

__all__ = ["GRACE_SECONDS", "Offer", "Offers", "Told"]

GRACE_SECONDS = 5.0
"""Seconds from the moment when nobody is told of an offer any more until it ends. What prefill was told may be late by
the time of two exchanges with the bootstrap server."""


class Told(NamedTuple):
    """What prefill is told of an offer.

    Attributes:
        number: Its number on this server.
        left: Seconds for which it may be asked for.
        first: Pages before those of `keys`.
        keys: The beginning of SGLang's hash of each page, which covers all tokens up to the end of the page; empty
            where the state that ends with the page is not held whole.
    """

    number: int
    left: float
    first: int
    keys: list[str]


class Offer:
    """A node of the tree, and the way to it. Its memory is pinned until the offer has ended.

    Args:
        number: Its number.
        hashes: SGLang's hash of each of the node's pages.
        pages: For each page of the way, its number in the pool of full attention. A tensor, which may still be copied.
        window: The same in the pool of sliding windows, and 0 where that has the page no longer; ``None`` without one.
        slot: The slot of the recurrent state, in a tensor; ``None`` if the node has none.
        written: Events after which the tensors and the memory have been written.
    """

    def __init__(
        self, number: int, hashes: Sequence[str], pages: Any, window: Any, slot: Any, written: Sequence[Any]
    ) -> None:
        self.number, self.hashes = number, tuple(hashes)
        self.tensors, self.written = (pages, window, slot), tuple(written)
        self.keys: tuple[str, ...] = ()
        self.first = len(pages) - len(self.hashes)
        self.pages: Any = None
        self.window: Any = None
        self.slot: int | None = None
        self.end = 0.0
        self.uses = 0
        self.over = False

    def settle(self, window_pages: int, slots: bool) -> None:
        """Wait until the memory has been written, and work out what prefill may ask for. On the thread of `Serving`.

        A window that begins before the node is pinned only where it ends with the node.

        Args:
            window_pages: Pages of a sliding window; 0 without one.
            slots: Whether there is recurrent state.
        """
        for each in self.written:
            each.synchronize()
        pages, window, slot = self.tensors
        self.pages = pages.numpy()
        self.window = None if window is None else window.numpy()
        self.slot = None if slot is None else int(slot)
        end, keys = len(self.pages), []
        for place, key in enumerate(self.hashes, self.first + 1):
            begin = max(0, place - window_pages)
            whole = not window_pages or (
                (place == end or begin >= self.first) and self.window is not None and self.window[begin:place].all()
            )
            keys.append(key if whole and (not slots or (place == end and slot is not None)) else "")
        self.keys = tuple(keys)


class Offers:
    """All offers of a rank. Thread-safe: the scheduler's thread makes and ends them, others read them.

    Args:
        lease: Seconds for which an offer lasts.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._changed = threading.Condition()
        """Its lock guards everything here."""
        self._version = 0
        self._count = 0
        self._offers: dict[int, Offer] = {}
        """In the order in which SGLang completes them."""
        self._at: dict[str, tuple[Offer, int]] = {}
        """For each key, an offer and how many pages end there."""

    def __len__(self) -> int:
        return len(self._offers)

    # The scheduler's thread.

    def add(self, hashes: Sequence[str], pages: Any, window: Any, slot: Any, written: Sequence[Any]) -> Offer:
        """A node that SGLang has just locked. It is told once `settled`."""
        with self._changed:
            offer = self._offers[self._count] = Offer(self._count, hashes, pages, window, slot, written)
            self._count += 1
            offer.end = time.monotonic() + self._lease
        return offer

    def ended(self) -> int:
        """How many of the first offers have ended. Nobody can ask for these any more."""
        now, count = time.monotonic(), 0
        with self._changed:
            for offer in self._offers.values():
                if offer.uses or offer.end > now:
                    break
                offer.over = True
                count += 1
        return count

    def pop(self) -> None:
        """SGLang unlocks the first one, which has ended."""
        with self._changed:
            self._forget(next(iter(self._offers)))

    def give_back(self, tokens: int, page: int, *, at_once: bool) -> None:
        """End the oldest offers early that pin so many tokens, about.

        Args:
            tokens: How many.
            page: Tokens of a page.
            at_once: Whether also those end at once that prefill may have been told of a moment ago.
        """
        end = time.monotonic() + (0.0 if at_once else GRACE_SECONDS)
        with self._changed:
            for offer in self._offers.values():
                if tokens <= 0:
                    break
                tokens -= len(offer.hashes) * page
                if offer.end > end:
                    offer.end = end
                    self._version += 1
            self._changed.notify_all()

    def clear(self, timeout: float) -> bool:
        """End and forget all offers. Blocks until nothing reads their memory, or for some time. Returns whether so."""
        until = time.monotonic() + timeout
        with self._changed:
            for offer in self._offers.values():
                offer.over = True
            quiet = self._changed.wait_for(
                lambda: not any(each.uses for each in self._offers.values()), max(0.0, until - time.monotonic())
            )
            for number in list(self._offers):
                self._forget(number)
        return quiet

    def _forget(self, number: int) -> None:
        offer = self._offers.pop(number)
        for key in offer.keys:
            if self._at.get(key, (None,))[0] is offer:
                del self._at[key]
        self._version += 1
        self._changed.notify_all()

    # Other threads.

    def settled(self, offer: Offer) -> None:
        """What may be asked of an offer is known."""
        with self._changed:
            if offer.number in self._offers:
                self._at.update({key: (offer, place) for place, key in enumerate(offer.keys, offer.first + 1) if key})
                self._version += 1
                self._changed.notify_all()

    def take(self, key: str) -> tuple[Offer, int] | None:
        """The offer that holds the state which ends with a page, and the number of pages up to there.

        It does not end before `put_back`. ``None`` if there is none, or it has ended.
        """
        with self._changed:
            found = self._at.get(key)
            if found is None or found[0].over:
                return None
            found[0].uses += 1
            return found

    def put_back(self, offer: Offer) -> None:
        """Nothing reads the memory of an offer any more that was taken."""
        with self._changed:
            offer.uses -= 1
            self._changed.notify_all()

    def news(self, told: Collection[int]) -> tuple[int, list[Told], list[int]]:
        """The version of what is offered, what was not told of it, and the numbers of what is not offered any more."""
        now, found = time.monotonic(), dict[int, Told]()
        with self._changed:
            for number, offer in self._offers.items():
                left = offer.end - now - GRACE_SECONDS
                if left > 0 and not offer.over and any(offer.keys):
                    keys = [key[:KEY_DIGITS] for key in offer.keys[-MOST_KEYS:]]
                    found[number] = Told(number, left, offer.first + len(offer.keys) - len(keys), keys)
            version = self._version
        return version, [each for each in found.values() if each.number not in told], [*{*told} - found.keys()]

    def wait(self, version: int, timeout: float) -> None:
        """Block until there is news since a version, or for some time."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout)
