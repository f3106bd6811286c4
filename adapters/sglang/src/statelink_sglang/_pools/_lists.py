"""Reads the lists of buffers that SGLang's pools publish, and names their entries."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from statelink.errors import StateError
from statelink.state import Region

__all__ = ["PAGES", "Entry", "Listing", "Named", "Reader", "has", "refuse"]

PAGES = "get_contiguous_buf_infos"
"""The method that lists pages. Every pool of pages has it."""


class Entry(NamedTuple):
    """One buffer in a list: its number, and ``items`` of ``nbytes`` bytes, which follow one another in a region.

    A buffer without bytes has no region, and no items. It keeps its place in the list.
    """

    number: int
    nbytes: int
    items: int
    region: Region | None


class Named(NamedTuple):
    """An entry, with its tensor and global layer."""

    layer: int | None
    part: str
    entry: Entry

    @property
    def label(self) -> str:
        """Name of the buffer."""
        return self.part if self.layer is None else f"layers.{self.layer}.{self.part}"


def has(pool: object, name: str) -> bool:
    """Whether a pool has a method or attribute, other than ``None``."""
    return getattr(pool, name, None) is not None


def refuse(pool: object, method: str, cause: str) -> StateError:
    """The error for something that cannot be described."""
    return StateError(
        f"cannot describe {type(pool).__name__}.{method}",
        cause=cause,
        hint="use another --disaggregation-transfer-backend with this model",
    )


class Listing(NamedTuple):
    """What one method of a pool lists."""

    pool: object
    method: str
    entries: Sequence[Entry]

    def refuse(self, cause: str) -> StateError:
        """The error for something in this list that cannot be described."""
        return refuse(self.pool, self.method, cause)

    def units(self, named: Named, unit: int, what: str) -> int:
        """Number of units of ``unit`` bytes in an item.

        Raises:
            StateError: It is no whole number of them.
        """
        if unit < 1 or named.entry.nbytes % unit:
            raise self.refuse(f"an item of {named.label!r} has {named.entry.nbytes} bytes: no whole {what}")
        return named.entry.nbytes // unit

    def in_rows(self, count: int) -> Listing:
        """The same buffers, of which each item is so many rows."""
        for each in self.entries:
            if each.items and each.nbytes % count:
                raise self.refuse(f"entry {each.number} has items of {each.nbytes} bytes, which are no {count} rows")
        return self._replace(
            entries=[
                each._replace(nbytes=each.nbytes // count, items=each.items * count) if each.items else each
                for each in self.entries
            ]
        )

    def by_layer(self, parts: Sequence[tuple[str, Sequence[int | None]]]) -> list[Named]:
        """Name the entries by their known order: tensor by tensor, with ascending layers in each.

        Args:
            parts: Each tensor in order, and the global layers that have it; ``None`` stands for the whole request.
        """
        names = [(layer, part) for part, layers in parts for layer in layers]
        if len(self.entries) != len(names):
            said = ", then ".join(f"{part} of {len(layers)} layers" for part, layers in parts)
            raise self.refuse(f"it lists {len(self.entries)} buffers; {said or 'nothing'} would be {len(names)}")
        return [Named(layer, part, entry) for (layer, part), entry in zip(names, self.entries, strict=True)]

    def by_id(
        self, method: str, ids: Sequence[int], parts: Sequence[str], span: tuple[int, int], others: dict[int, str]
    ) -> list[Named]:
        """Name the entries by their ids. The id of a layer comes once for each of its tensors.

        Args:
            method: The method that returned the ids.
            ids: For each entry, its global layer, or one of ``others``.
            parts: The tensors of every layer, in order.
            span: The layers that may be here.
            others: Names of ids that stand for no layer. Each comes once, and only beside layers.
        """
        counts = Counter(ids)
        for layer, count in counts.items():
            expected = [others[layer]] if layer in others else parts
            if layer not in others and not span[0] <= layer < span[1]:
                raise refuse(
                    self.pool, method, f"layer {layer} is not in [{span[0]}, {span[1]}), the layers of this rank"
                )
            if count != len(expected):
                raise refuse(
                    self.pool,
                    method,
                    f"layer {layer} has {count} buffers; {len(expected)} are known ({', '.join(expected) or 'none'})",
                )
        if not counts.keys() - others.keys():
            raise refuse(self.pool, method, f"{len(self.entries)} buffers have no layer's id")
        seen: Counter[int] = Counter()
        found = []
        for layer, entry in zip(ids, self.entries, strict=True):
            known = Named(None, others[layer], entry) if layer in others else Named(layer, parts[seen[layer]], entry)
            found.append(known)
            seen[layer] += 1
        return found


class Reader:
    """Reads the lists of pools, and remembers which, so that no list is left out without a word."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._read: set[tuple[int, str]] = set()
        self._spans: list[tuple[int, int]] = []

    def infos(self, pool: object, method: str, *, keep: bool = True) -> Listing:
        """The buffers that ``pool.method()`` lists; none if the pool lacks the method.

        Args:
            pool: The pool.
            method: Name of a method that returns three parallel lists: addresses, lengths, item sizes.
            keep: Whether the caller describes them.
        """
        entries = self._entries(pool, method)
        self._read.add((id(pool), method))
        if keep:
            self._spans += [(e.region.address, e.region.address + e.region.nbytes) for e in entries if e.region]
        return Listing(pool, method, entries)

    def values(self, listing: Listing, method: str) -> list[Any]:
        """A list with one value for each buffer of a list; empty if the pool lacks the method."""
        values = list(_called(listing.pool, method, ()))
        if values and len(values) != len(listing.entries):
            raise refuse(
                listing.pool,
                method,
                f"it has {len(values)} values for the {len(listing.entries)} buffers of {listing.method}",
            )
        return values

    def holds(self, entries: Iterable[Entry]) -> bool:
        """Whether all these bytes are in allocations that a component has."""
        return all(
            any(low <= e.region.address and e.region.address + e.region.nbytes <= high for low, high in self._spans)
            for e in entries
            if e.region
        )

    def nothing_left(self, pools: Iterable[object]) -> None:
        """Refuse lists that no component has, if they have bytes that no other list has."""
        for pool in pools:
            for method in dir(pool):
                if not _is_list(method) or (id(pool), method) in self._read or not has(pool, method):
                    continue
                parameters = inspect.signature(getattr(pool, method)).parameters.values()
                free = any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
                if not free and not self.holds(self._entries(pool, method, lacking=True)):
                    raise refuse(
                        pool,
                        method,
                        "it lists buffers that a pool of this kind is not known to have, and that no other list has",
                    )

    def _entries(self, pool: object, method: str, *, lacking: bool = False) -> list[Entry]:
        given = _called(pool, method, ((), (), ()), lacking=lacking)
        try:
            triples = [(int(address), int(nbytes), int(item)) for address, nbytes, item in zip(*given, strict=True)]
        except (TypeError, ValueError):
            raise refuse(
                pool, method, f"it returned {given!r:.80}; addresses, lengths and item sizes are expected"
            ) from None
        return [self._entry(pool, method, number, *each) for number, each in enumerate(triples)]

    def _entry(self, pool: object, method: str, number: int, address: int, nbytes: int, item: int) -> Entry:
        if not nbytes:
            return Entry(number, 1, 0, None)
        if address < 1 or not 0 < item <= nbytes:
            raise refuse(pool, method, f"entry {number} has {nbytes} bytes at {address:#x} in items of {item}")
        return Entry(number, item, nbytes // item, Region(address, nbytes, self._kind))


def _called(pool: object, method: str, default: Any, *, lacking: bool = False) -> Any:
    """The result of ``pool.method()``; ``default`` if the pool lacks it, or only a base class has it.

    Args:
        pool: The pool.
        method: Name of the method.
        default: What stands for a method that is not there.
        lacking: Also return ``default`` if the method asks an inner pool for a list, and the inner pool lacks it. A
            pool of several pools offers lists of scales even if its inner pools have no scales.
    """
    found = getattr(pool, method, None)
    if found is None:
        return default
    try:
        return found()
    except Exception as error:
        if method != PAGES and (isinstance(error, NotImplementedError) or (lacking and _lacks(error, pool))):
            return default
        raise refuse(pool, method, f"it raised {type(error).__name__}: {error}") from error


def _lacks(error: Exception, pool: object) -> bool:
    """Whether an error says that another object than this pool lacks a list."""
    name = error.name if isinstance(error, AttributeError) else None
    return isinstance(name, str) and _is_list(name) and name != PAGES and getattr(error, "obj", pool) is not pool


def _is_list(method: str) -> bool:
    """Whether a method of this name lists buffers."""
    return method.startswith("get_") and method.endswith("_buf_infos")
