"""Links over memory that the clauses see, and functions that drive them in a worker. The host comes first."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import state

from . import _inside
from ._bench import NOISE, Subject
from ._memory import POISON, Array
from ._worker import Hung

if TYPE_CHECKING:
    from statelink.errors import Reason

    from ._worker import Host
    from ._workers import Worker

__all__ = ["PAGES", "TOKENS", "LinkEnd", "Seen"]

PAGES, PAGE, ROW = 96, 4, 16 << 10
"""Pages of a link, tokens of a page, bytes of a token; for keys and for values."""

TOKENS = 32 * PAGE
"""Tokens of a request, unless a clause says otherwise."""

EDGE = PAGES * PAGE * ROW


class Seen(NamedTuple):
    """The state of a room at one moment."""

    status: statelink.Status
    reason: Reason | None
    quiesced: bool


class Gate:
    """A ready event that is not set yet."""

    def __init__(self) -> None:
        self.open = False

    def query(self) -> bool:
        """Whether it happened."""
        return self.open


class LinkEnd:
    """A link in a worker. This process shares the memory of its pages.

    Attributes:
        key: Name of the link in the worker.
        keys: The keys of every page, ``[pages, bytes]``; uint8.
        values: The values of every page, in the same shape.
    """

    def __init__(self, subject: Subject, worker: Worker, role: str, key: str, base: int) -> None:
        self.subject = subject
        self.worker = worker
        self.key = key
        self.keys: Array = worker.arena.bytes[base : base + EDGE].reshape(PAGES, -1)
        self.values: Array = worker.arena.bytes[base + EDGE : base + 2 * EDGE].reshape(PAGES, -1)
        for array in (self.keys, self.values):
            array[:] = POISON if role == "decode" else NOISE[: array.size].reshape(array.shape)
        what = subject.name, dict(subject.options)
        self.address: str = worker(open_link, key, role, *what, base, dict(subject.config), subject.state_type)

    def __call__(self, function: Any, *arguments: Any) -> Any:
        """Call a function of this module in the worker, for this link."""
        return self.worker(function, self.key, *arguments)

    def receiver(self) -> LinkEnd:
        """The same link under a second name, for rooms that receive. Its role is ``both``.

        A room that receives may have the id of a room that sends. The names of the link tell them apart.
        """
        other = copy.copy(self)
        other.key = f"{self.key}, receiving"
        self.worker(name_again, self.key, other.key)
        return other

    def close(self) -> bool:
        """Close the link. Returns whether `Link.close` returned true both times."""
        ended: bool = self.worker(close, [self.key], self.subject.patience)
        return ended

    def wait(self, room: int, *, quiesced: bool = True) -> Seen:
        """Wait for the end of a room, and return its state then. Blocks for as long as the subject's patience.

        Raises:
            Hung: The room did not end, or did not quiesce.
        """
        patience = self.subject.patience
        seen: Seen = self(wait, room, patience, quiesced)
        if seen.status not in (statelink.Status.SUCCEEDED, statelink.Status.FAILED):
            raise Hung(f"a room of {self.key} did not end within {patience:g} s: it is {seen.status.name}")
        if quiesced and not seen.quiesced:
            raise Hung(f"a room of {self.key} did not come to rest within {patience:g} s: {seen.reason}")
        return seen


def open_link(
    host: Host,
    key: str,
    role: str,
    backend: str,
    options: Mapping[str, Any],
    base: int,
    more: Mapping[str, Any],
    pages: str,
) -> str:
    """Open a link over pages of a state type, at an offset in this worker's memory. Returns its address."""
    keys, values = (
        state.Memory.pointer(host.address + start, (PAGES, PAGE, 2, ROW // 2), "uint8", 1, kind=host.kind)
        for start in (base, base + EDGE)
    )
    if pages == "kv":
        held = state.kv_pages({0: (keys, values)}, heads=2)
    else:
        held = state.whole_items({"keys": keys, "values": values}, name="kv", type=pages, page=PAGE)
    inventory = state.describe(key, [held])
    config = {"role": role, "backend": backend, "options": dict(options), "heartbeat": 0.3, "liveness": 3.0, **more}
    host.links[key] = statelink.open(config, inventory)
    return host.links[key].address


def name_again(host: Host, key: str, another: str) -> None:
    """Give a link a second name in this worker."""
    host.links[another] = host.links[key]


def send(host: Host, key: str, room: int, tokens: int = TOKENS) -> None:
    """Open a room on prefill."""
    host.rooms[key, room] = host.links[key].send(room, tokens)


def push(
    host: Host, key: str, room: int, pages: Sequence[int], first: int = 0, last: int = TOKENS, gated: bool = False
) -> None:
    """Push pages for a range of tokens. If they are gated, they are not ready before `release`."""
    sending: Any = host.rooms[key, room]
    ready = host.kept.setdefault(f"gate-{key}-{room}", Gate()) if gated else None
    sending.push({"kv": np.asarray(pages)}, span=(first, last), ready=ready)


def receive(host: Host, key: str, room: int, peer: str, pages: Sequence[int] | None, tokens: int = TOKENS) -> None:
    """Open a room on decode."""
    items = None if pages is None else {"kv": np.asarray(pages)}
    host.rooms[key, room] = host.links[key].receive(room, peer, tokens, items)


def abort(host: Host, key: str, room: int) -> None:
    """Give a room up."""
    host.rooms[key, room].abort()


def suspend(host: Host, key: str, patience: float) -> None:
    """Unregister a link's memory."""
    host.links[key].suspend(patience)


def resume(host: Host, key: str) -> None:
    """Register a link's memory again."""
    host.links[key].resume()


def release(host: Host, key: str, room: int) -> None:
    """Make gated pages ready."""
    host.kept[f"gate-{key}-{room}"].open = True


def wait(host: Host, key: str, room: int, patience: float, quiesced: bool) -> Seen:
    """Wait for the end of a room. Returns its state then, or after ``patience`` seconds."""
    held = host.rooms[key, room]
    held.wait(patience, quiesced=quiesced)
    return Seen(held.status, held.reason, held.quiesced)


def reach(host: Host, key: str, room: int, status: statelink.Status, patience: float) -> Seen:
    """Wait until a room has at least this status, or has failed, or ``patience`` seconds are over."""
    held = host.rooms[key, room]
    for _ in range(int(patience / 0.002)):
        if held.status >= status or held.status is statelink.Status.FAILED:
            break
        _inside.rest(host, 0.002)
    return Seen(held.status, held.reason, held.quiesced)


def close(host: Host, keys: Sequence[str], patience: float) -> bool:
    """Close every link twice. Returns whether each `Link.close` returned true."""
    links = [host.links.pop(key) for key in keys if key in host.links]
    return all([link.close(patience) and link.close() for link in links])
