"""Staging in the model: rings of a few parcels, and a book of its own of whose each byte of them is.

The book is kept from outside: of what is asked of a ring, lent by it and given back to it. Gathering and scattering
take their time here, as they do in a thread, and look at whose the pages are before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from statelink.config import Staging
from statelink.staged import Staged
from statelink.staged._receive import StagedReceive
from statelink.staged._ring import Ring
from statelink.staged._send import StagedSend

from .threads import Defect, give_way

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    import pytest

    from statelink.backend import HookContext, Strategy
    from statelink.plan import Places
    from statelink.staged._memory import StagingMemory

    from .process import Process

__all__ = ["RINGS", "Lease", "WatchedMemory", "lease_at", "owner_of", "rings_of", "staging", "watch", "whole"]

PARCEL = 24
"""Bytes: a page and a half of both layers."""
RINGS = (PARCEL, 256 + PARCEL, 512 + PARCEL)
"""Bytes of one to three parcels, since each begins at a multiple of 256."""


class Lease(NamedTuple):
    """Space of a ring, from the moment when it is lent until it is given back."""

    number: int
    at: int
    nbytes: int
    owner: object


_books: WeakKeyDictionary[Ring, dict[int, Lease]] = WeakKeyDictionary()
_contexts: WeakKeyDictionary[object, HookContext] = WeakKeyDictionary()


def staging(components: Iterable[str], ring_bytes: int, every: Iterable[str]) -> Staging | None:
    """Force some components through rings, and leave the rest alone."""
    chosen = set(components)
    modes: Any = {name: "always" if name in chosen else "never" for name in every}
    return Staging(ring_bytes=ring_bytes, parcel_bytes=PARCEL, components=modes) if chosen else None


def rings_of(strategies: Mapping[str, Strategy]) -> list[Ring]:
    """The rings of a link."""
    staged = {each for each in strategies.values() if isinstance(each, Staged)}
    return [ring for each in staged for ring in each._rings.values()]


def lease_at(process: Process, address: int, nbytes: int) -> Lease | None:
    """What these bytes are lent for, if they lie in a ring of a process and are lent as one."""
    for ring in process.rings:
        at = address - ring.memory.address
        for lease in _books.get(ring, {}).values():
            if lease.at <= at and at + nbytes <= lease.at + lease.nbytes:
                return lease
    return None


def owner_of(lease: Lease) -> HookContext:
    """The room, its use, and the other side."""
    return _contexts[lease.owner]


def whole(ring: Ring) -> bool:
    """Whether nothing of it is lent, and nobody waits."""
    seen = ring.snapshot()
    return not (_books.get(ring) or seen["in_use"] or seen["waiting"] or seen["quarantined"])


class WatchedMemory:
    """Staging memory whose every gathering and scattering is looked at, and may take a while."""

    def __init__(self, memory: StagingMemory, process: Process) -> None:
        self._memory = memory
        self._process = process
        self.address, self.nbytes, self.kind = memory.address, memory.nbytes, memory.kind

    def pack(self, tiles: Iterable[Places], at: int) -> None:
        self._each(list(tiles), at, self._memory.pack, sends=True)

    def unpack(self, tiles: Iterable[Places], at: int) -> None:
        self._each(list(tiles), at, self._memory.unpack, sends=False)

    def _each(
        self, tiles: list[Places], at: int, copy: Callable[[Iterable[Places], int], None], *, sends: bool
    ) -> None:
        lease = self._look(tiles, at, sends)
        for tile in tiles:
            give_way()
            copy([tile], at)
            at += tile.nbytes
        give_way()
        if self._look(tiles, lease.at, sends) is not lease:
            raise Defect(f"space of {self._process.name} was given back while it was packed or unpacked")

    def _look(self, tiles: list[Places], at: int, sends: bool) -> Lease:
        lease = lease_at(self._process, self.address + at, sum(tile.nbytes for tile in tiles))
        if lease is None:
            raise Defect(f"{self._process.name} packs or unpacks space that is not lent")
        context = owner_of(lease)
        for tile in tiles:
            for address in tile.addresses.tolist():
                for row in tile.rows.tolist():
                    at_row = address + row * tile.width
                    self._process.own(at_row, tile.width, context.room, context.generation, sends=sends)
        return lease


def watch(patch: pytest.MonkeyPatch, ends: Counter[str]) -> None:
    """Keep the books.

    Args:
        patch: Takes all of it back.
        ends: Counts in which state hooks were when their room failed.
    """
    numbers = iter(range(1 << 62))
    ask, give = Ring.ask, Ring.give

    def watched_ask(ring: Ring, owner: object, nbytes: int, then: Callable[[int], None], *, peer: str) -> None:
        def lent(at: int) -> None:
            book = _books.setdefault(ring, {})
            for other in book.values():
                if at < other.at + other.nbytes and other.at < at + nbytes:
                    raise Defect(f"{nbytes} bytes at {at} of a ring are lent twice")
            book[at] = Lease(next(numbers), at, nbytes, owner)
            give_way()
            then(at)

        give_way()
        ask(ring, owner, nbytes, lent, peer=peer)

    def watched_give(ring: Ring, at: int) -> None:
        if _books[ring].pop(at, None) is None:
            raise Defect("space of a ring is given back twice")
        give(ring, at)

    def noted(kind: Any, method: str) -> None:
        original = getattr(kind, method)

        def call(hook: object, context: HookContext, *args: Any) -> Any:
            _contexts[hook] = context
            return original(hook, context, *args)

        patch.setattr(kind, method, call)

    def counted(kind: Any, states: Callable[[Any], Iterator[str]]) -> None:
        original = kind.abort

        def abort(hook: Any, context: HookContext) -> None:
            ends.update(states(hook))
            original(hook, context)

        patch.setattr(kind, "abort", abort)

    patch.setattr(Ring, "ask", watched_ask)
    patch.setattr(Ring, "give", watched_give)
    noted(StagedSend, "open")
    noted(StagedReceive, "prepare")
    counted(StagedSend, _sending)
    counted(StagedReceive, _receiving)


def _sending(hook: StagedSend) -> Iterator[str]:
    if hook._wanted:
        yield "prefill waits for space"
    if hook._ready:
        yield "prefill has space on both sides"
    if hook._held.difference(at for at, _ in hook._ready.values()):
        yield "prefill's space is read"


def _receiving(hook: StagedReceive) -> Iterator[str]:
    if hook._asked.keys() - hook._granted.keys():
        yield "decode has nothing to lend"
    if hook._granted:
        yield "decode's space is lent"
    if hook._nbytes:
        yield "decode has scattered a part"
