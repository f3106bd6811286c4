"""One side: its pages, and what it is told to do: open a link, move requests, drive the library by itself."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import statelink
from statelink import Status, state
from statelink._devices import allocate
from statelink.backend import RawLibrary, RawTransfers, Region
from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.registry import load_backend

from ._messages import Close, Copy, Know, Move, Open, Raw, Receive, Send, Settle, Told

__all__ = ["Pages", "Side"]

Rows = npt.NDArray[np.uint64]
SPARE = 8
"""One page in so many is spare, so that scattered pages are seldom neighbours."""


class Pages:
    """Pages on the host or on a device. They are freed with this object.

    Args:
        role: ``prefill`` has the right bytes from the start; ``decode`` has zeros.
        block: Bytes of a page.
        count: Most pages of a request.
        kind: Memory kind.
        allocator: See `statelink._devices.allocate`.
    """

    def __init__(self, role: str, block: int, count: int, kind: str, allocator: str) -> None:
        self.role, self.block = role, block
        self.number = count + max(1, count // SPARE)
        self._right = np.random.default_rng(block).integers(0, 256, (self.number, block), np.uint8)
        self._host = self._right if role == "prefill" else np.zeros_like(self._right)
        self._device = None if kind == "dram" else allocate(kind, self._host.nbytes, allocator)
        self.address = int(self._host.ctypes.data)
        if self._device is not None:
            self._device.write(0, self._host.reshape(-1))
            self.address = self._device.address
        self.region = Region(self.address, self._host.nbytes, kind)

    @property
    def on_host(self) -> bool:
        """Whether this process can read the pages as they are."""
        return self._device is None

    def inventory(self) -> state.Inventory:
        """One layer of pages, each of one token, in one buffer."""
        pages = state.Memory.pointer(self.address, (self.number, 1, self.block), "uint8", 1, kind=self.region.kind)
        return state.describe(f"bench-{self.role}", [state.mla_pages({0: pages})])

    def numbers(self, role: str, count: int, scattered: bool) -> npt.NDArray[np.intp]:
        """Pages of a request on the side with this role; both sides compute the same."""
        if not scattered:
            return np.arange(count)
        seed = [self.block, count, int(role == "decode")]
        return np.random.default_rng(seed).permutation(self.number)[:count]

    def rows(self, numbers: npt.NDArray[np.intp], address: int) -> Rows:
        """Addresses and lengths of pages of a pool that begins at ``address``."""
        starts = np.uint64(address) + numbers.astype(np.uint64) * np.uint64(self.block)
        return np.stack([starts, np.full(len(starts), self.block, np.uint64)], axis=1)

    def is_right(self, count: int, scattered: bool) -> bool:
        """Whether all pages of a request arrived, on decode."""
        if self._device is not None:
            self._device.read(0, self._host.reshape(-1))
        came = self._host[self.numbers("decode", count, scattered)]
        return bool(np.array_equal(came, self._right[self.numbers("prefill", count, scattered)]))

    def forget(self) -> None:
        """Zero the pages of decode."""
        self._host[:] = 0
        if self._device is not None:
            self._device.write(0, self._host.reshape(-1))

    def copy(self, count: int, scattered: bool) -> float:
        """Copy as many pages inside this process, on one thread. Returns the seconds."""
        source, target = (self.numbers(role, count, scattered) for role in ("prefill", "decode"))
        began = time.perf_counter()
        if scattered:
            self._host[target] = self._right[source]
        else:
            np.copyto(self._host[:count], self._right[:count])
        return time.perf_counter() - began


DEADLINE = 60.0
Answer = dict[str, Any]


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
        self._opened: Open | None = None
        self._does: Mapping[type[Told], Callable[[Any], Answer]] = {
            Open: self._open,
            Send: self._send,
            Receive: self._receive,
            Settle: self._settle,
            Copy: self._copy,
            Raw: self._start_raw,
            Know: self._know,
            Move: self._move,
            Close: self._close,
        }

    def do(self, told: Told) -> Answer:
        """Do one thing. The answer is as in JSON, and a failure is one, too: ``error``, with a ``hint``."""
        try:
            answer: Answer = msgspec.to_builtins(self._does[type(told)](told))
            return answer
        except StatelinkError as error:
            return {"error": str(error).partition("\nhint:")[0], "hint": error.hint}
        # The last three are those of numbers and options that libraries do not take.
        except (OSError, MemoryError, ArithmeticError, TypeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}", "hint": ""}

    def _open(self, told: Open) -> Answer:
        self._free()
        self._opened = told
        self._pages = Pages(self._role, told.block, told.count, *told.memory)
        config = {
            "role": self._role,
            "backend": told.backend,
            "options": told.options,
            "inspect": False,
            **told.config,
        }
        self._link = statelink.open(config, self._pages.inventory())
        return {"address": self._link.address}

    def _send(self, told: Send) -> Answer:
        link, pages = self._ready()
        if self._sending:
            raise StatelinkError("requests that were sent before have not been settled")
        numbers = pages.numbers(self._role, told.pages, told.scattered)
        for room in range(told.first, told.first + told.rooms):
            sending = link.send(room, told.pages, deadline=told.lasts)
            sending.push({"kv": numbers})
            self._sending.append(sending)
        return {}

    def _settle(self, told: Settle) -> Answer:
        del told
        sent, self._sending, until = self._sending, [], time.monotonic() + DEADLINE
        for sending in sent:
            status = sending.wait(max(0.0, until - time.monotonic()), quiesced=True)
            sending.check()
            if status is not Status.SUCCEEDED:
                raise StatelinkError("a request did not end")
        return {}

    def _receive(self, told: Receive) -> Answer:
        link, pages = self._ready()
        if told.compared:
            pages.forget()
        numbers = pages.numbers(self._role, told.pages, told.scattered)
        seconds, transports = [], set[str]()
        for room in range(told.first, told.first + told.rooms):
            began = time.perf_counter()
            receiving = link.receive(room, told.peer, told.pages, {"kv": numbers}, deadline=DEADLINE)
            status = receiving.wait(DEADLINE)
            seconds.append(time.perf_counter() - began)
            receiving.check()
            if status is not Status.SUCCEEDED:
                raise StatelinkError("a request did not end")
            transports.update(receiving.report.transports.values())
        right = pages.is_right(told.pages, told.scattered) if told.compared else None
        return {"seconds": seconds, "right": right, "transports": sorted(transports)}

    def _copy(self, told: Copy) -> Answer:
        _, pages = self._ready()
        if not pages.on_host:
            return {"seconds": [], "cpu": 0.0}
        before = time.thread_time()
        seconds = [pages.copy(told.pages, told.scattered) for _ in range(told.rounds)]
        return {"seconds": seconds, "cpu": time.thread_time() - before}

    def _start_raw(self, told: Raw) -> Answer:
        """If the backend can, also says where the pages are."""
        self._end_raw()
        _, pages = self._ready()
        assert self._opened is not None
        kind = load_backend(self._opened.backend)
        if not issubclass(kind, RawTransfers):
            return {"raw": None}
        options = read_options(kind.Options, self._opened.options, f"options of backend {kind.name!r}")
        self._raw = kind.raw(f"raw-{self._role}-{os.getpid()}", options, told.host, [pages.region])
        return {"raw": self._raw.address(), "at": pages.address}

    def _know(self, told: Know) -> Answer:
        _, pages = self._ready()
        ends = [
            pages.rows(pages.numbers(role, told.pages, told.scattered), at)
            for role, at in (("prefill", pages.address), ("decode", told.at))
        ]
        self._library().connect(told.raw, *ends)
        return {}

    def _move(self, told: Move) -> Answer:
        library = self._library()
        return {"seconds": [library.move() for _ in range(told.rounds)]}

    def _close(self, told: Close) -> Answer:
        del told
        self._free()
        return {}

    def close(self) -> None:
        """Close what is open, and end this process: a library's threads may not hold it up."""
        with contextlib.suppress(StatelinkError):
            self._free()
        sys.stderr.flush()
        os._exit(0)

    def _free(self) -> None:
        self._end_raw()
        link, self._link, self._sending = self._link, None, []
        if link is not None:
            link.close()
        self._pages = None

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
