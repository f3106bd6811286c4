"""Sends what decode offers to the prefill servers that ask for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from statelink import Status
from statelink.backend import logger
from statelink.errors import ClosedError

if TYPE_CHECKING:
    from statelink import Link, Sending, Wanted

    from ._offers import Offer, Offers

__all__ = ["Serving"]

log = logger("statelink.sglang")

IDLE_SECONDS = 0.1
BUSY_SECONDS = 0.002
"""Seconds to wait for the next room while rooms are open, and while an offer may have been made."""
ENDED = Status.SUCCEEDED, Status.FAILED


class Serving:
    """A thread that opens the rooms for which prefill asks. It also works out what may be asked of each offer.

    Args:
        link: Sends.
        offers: What is held.
        page: Tokens of a page.
        window_pages: Pages of a sliding window; 0 without one.
        slots: Whether there is recurrent state.
        items: Makes the items of a room from the pages, the window's pages and the slot.
        deadline: Seconds that a room may take.
    """

    def __init__(
        self,
        link: Link,
        offers: Offers,
        page: int,
        window_pages: int,
        slots: bool,
        items: Callable[[Any, Any, int | None], dict[str, Any]],
        deadline: float,
    ) -> None:
        self._link, self._offers, self._page = link, offers, page
        self._window_pages, self._slots, self._items, self._deadline = window_pages, slots, items, deadline
        self.made: SimpleQueue[Offer] = SimpleQueue()
        """Offers whose memory may still be written."""
        self._open: list[tuple[Sending, Offer]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statelink-serving", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Open no more rooms, and abort those that are open. Blocks until the thread has ended."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                found = self._link.wanted(BUSY_SECONDS if self._open else IDLE_SECONDS)
            except ClosedError:  # the process ends
                return
            for wanted in found:
                try:
                    self._serve(wanted)
                except Exception:  # a defect here must not end what others are sent
                    log.exception("room %d of prefill's is not served", wanted.room)
            self._settle()
            self._end()
        for sending, _ in self._open:
            sending.abort("SGLang gives its memory away")

    def _settle(self) -> None:
        while True:
            try:
                offer = self.made.get_nowait()
            except Empty:
                return
            try:
                offer.settle(self._window_pages, self._slots)
            except Exception:  # nobody is told of it
                log.exception("what decode's prefix cache holds is not offered")
            else:
                self._offers.settled(offer)

    def _end(self) -> None:
        still = []
        for sending, offer in self._open:
            if sending.status in ENDED and sending.quiesced:
                self._offers.put_back(offer)
            else:
                still.append((sending, offer))
        self._open = still

    def _serve(self, wanted: Wanted) -> None:
        self._settle()
        room, tokens, prefix, content = wanted
        found = self._offers.take(content.hex())
        if found is None or tokens is None or tokens != found[1] * self._page or not 0 <= prefix < tokens:
            if found is not None:
                self._offers.put_back(found[0])
            self._link.send(room, tokens, content=content or None).abort("decode's prefix cache does not offer this")
            return
        offer, end = found
        begin = prefix // self._page
        window = None
        if offer.window is not None:
            window = offer.window[max(begin, end - self._window_pages) : end]
        sending: Sending | None = None
        try:
            sending = self._link.send(room, tokens, deadline=self._deadline, content=content)
            self._open.append((sending, offer))
            sending.push(self._items(offer.pages[begin:end], window, offer.slot), span=(prefix, tokens), last=True)
        except Exception as error:
            if sending is None:
                self._offers.put_back(offer)
            else:
                sending.abort(str(error))
            raise
