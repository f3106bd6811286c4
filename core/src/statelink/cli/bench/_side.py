"""What one side does when it is told: open a link, move requests, drive the library by itself."""

from __future__ import annotations

import base64
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

import statelink
from statelink import Status
from statelink.backend import RawLibrary, RawTransfers
from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.registry import load_backend

from ._pages import Pages

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["Side", "serve"]

DEADLINE = 60.0
MOST_ROOMS = 4096
Told = dict[str, Any]


class Side:
    """One side. Not thread-safe; every method may block.

    Args:
        role: ``prefill`` is the source of the bytes, ``decode`` their target.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._link: statelink.Link | None = None
        self._pages: Pages | None = None
        self._raw: RawLibrary | None = None
        self._sending: list[statelink.Sending] = []
        self._told: Told = {}
        self._does: dict[str, Callable[[Told], Told]] = {
            "open": self._open,
            "send": self._send,
            "receive": self._receive,
            "settle": self._settle,
            "copy": self._copy,
            "raw": self._start_raw,
            "know": self._know,
            "move": self._move,
            "close": self._close,
        }

    def do(self, told: Told) -> Told:
        """Do one thing. A failure is an answer, too: ``error``, with a ``hint``."""
        try:
            return self._does[told["do"]](told)
        except StatelinkError as error:
            return {"error": str(error).partition("\nhint:")[0], "hint": error.hint}
        # The last three are those of a message that is not as it has to be.
        except (OSError, MemoryError, KeyError, TypeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}", "hint": ""}

    def _open(self, told: Told) -> Told:
        """Allocate ``count`` pages of ``block`` bytes, and open a link over them."""
        self._close(told)
        self._told = told
        kind, allocator = told["memory"]
        self._pages = Pages(self._role, told["block"], told["count"], kind, allocator)
        config = {
            "role": self._role,
            "backend": told["backend"],
            "options": told["options"],
            "inspect": False,
            **told["config"],
        }
        self._link = statelink.open(config, self._pages.inventory())
        return {"address": self._link.address}

    def _send(self, told: Told) -> Told:
        """Send ``rooms`` requests, the first of which is ``first``. Decode takes them one by one."""
        link, pages = self._ready()
        numbers = pages.numbers(self._role, told["pages"], told["scattered"])
        for room in range(told["first"], told["first"] + min(told["rooms"], MOST_ROOMS)):
            sending = link.send(room, told["pages"], deadline=told["lasts"])
            sending.push({"kv": numbers})
            self._sending.append(sending)
        return {}

    def _settle(self, told: Told) -> Told:
        """Wait until the requests have ended."""
        del told
        for sending in self._sending:
            sending.wait(DEADLINE, quiesced=True)
            sending.check()
        self._sending.clear()
        return {}

    def _receive(self, told: Told) -> Told:
        """Receive ``rooms`` requests, one after the other. Compares the bytes of the last one if ``compared``."""
        link, pages = self._ready()
        if told["compared"]:
            pages.forget()
        numbers = pages.numbers(self._role, told["pages"], told["scattered"])
        seconds, transports = [], set[str]()
        for room in range(told["first"], told["first"] + told["rooms"]):
            began = time.perf_counter()
            receiving = link.receive(room, told["peer"], told["pages"], {"kv": numbers}, deadline=DEADLINE)
            status = receiving.wait(DEADLINE)
            seconds.append(time.perf_counter() - began)
            receiving.check()
            if status is not Status.SUCCEEDED:
                raise StatelinkError("a request did not end")
            transports.update(receiving.report.transports.values())
        right = pages.is_right(told["pages"], told["scattered"]) if told["compared"] else None
        return {"seconds": seconds, "right": right, "transports": sorted(transports)}

    def _copy(self, told: Told) -> Told:
        """Copy the same pages inside this process."""
        _, pages = self._ready()
        if not pages.on_host:
            return {"seconds": []}
        return {"seconds": [pages.copy(told["pages"], told["scattered"]) for _ in range(told["rounds"])]}

    def _start_raw(self, told: Told) -> Told:
        """Start the library by itself, if the backend can. Says where the pages are."""
        self._end_raw()
        _, pages = self._ready()
        kind = load_backend(self._told["backend"])
        if not issubclass(kind, RawTransfers):
            return {"raw": None}
        options = read_options(kind.Options, self._told["options"], f"options of backend {kind.name!r}")
        self._raw = kind.raw(f"raw-{self._role}-{os.getpid()}", options, told["host"], [pages.region])
        return {"raw": base64.b64encode(self._raw.address()).decode(), "at": pages.address}

    def _know(self, told: Told) -> Told:
        """At the source: know the target, and what to move."""
        _, pages = self._ready()
        ends = [
            pages.rows(pages.numbers(role, told["pages"], told["scattered"]), at)
            for role, at in (("prefill", pages.address), ("decode", told["at"]))
        ]
        self._library().connect(base64.b64decode(told["raw"]), *ends)
        return {}

    def _move(self, told: Told) -> Told:
        """At the source: move the pages so many times."""
        library = self._library()
        return {"seconds": [library.move() for _ in range(told["rounds"])]}

    def _close(self, told: Told) -> Told:
        """Close what is open, and free the pages."""
        del told
        self._end_raw()
        link, self._link, self._sending = self._link, None, []
        if link is not None:
            link.close()
        self._pages = None
        return {}

    def _end_raw(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()

    def _ready(self) -> tuple[statelink.Link, Pages]:
        if self._link is None or self._pages is None:
            raise StatelinkError("this side has no open link")
        return self._link, self._pages

    def _library(self) -> RawLibrary:
        if self._raw is None:
            raise StatelinkError("the library was not started")
        return self._raw


def serve(role: str, pipe: Connection) -> None:
    """Run one side in this process, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    os.dup2(2, 1)  # what libraries print must not get between the results
    side = Side(role)
    try:
        while True:
            told = msgspec.json.decode(pipe.recv_bytes(), type=dict[str, Any])
            pipe.send_bytes(msgspec.json.encode(side.do(told)))
    except (EOFError, OSError):
        side.do({"do": "close"})
        sys.stderr.flush()
        os._exit(0)  # a library's threads may not hold the process up
