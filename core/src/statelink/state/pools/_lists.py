"""Reads the lists that an engine's pools publish, and names their entries."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from statelink.errors import StateError
from statelink.state._inventory import Region

__all__ = ["NGRAM", "PAGES", "ROPE", "Entry", "Named", "Reader", "band", "by_id", "by_layer", "has", "refuse"]

NGRAM, ROPE = (1 << 32) - 1, (1 << 32) - 2
"""Ids in state lists that stand for no layer: the n-gram history, and the ring of rotary positions."""
MAX_UINT64 = (1 << 64) - 1
PAGES = ("get_contiguous_buf_infos", "get_sparse_kv_buf_infos")
"""Methods that list pages. Every pool has one of them."""


class Entry(NamedTuple):
    """One buffer in a list: its number, and ``items`` of ``nbytes`` bytes, ``stride`` bytes apart."""

    number: int
    address: int
    stride: int
    nbytes: int
    items: int
    region: Region | None

    def within(self, offset: int, nbytes: int) -> Entry:
        """The buffer whose items are a part of these items: ``nbytes`` bytes from ``offset`` on."""
        return self._replace(address=self.address + offset, nbytes=nbytes)


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
    """Whether a pool offers a method or attribute."""
    return getattr(pool, name, None) is not None


def refuse(pool: object, method: str, cause: str, hint: str = "") -> StateError:
    """The error for something that cannot be described."""
    return StateError(f"cannot describe {type(pool).__name__}.{method}", cause=cause, hint=hint)


class Reader:
    """Reads the lists of pools, and remembers which, so that no list is silently left out."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._read: set[tuple[int, str]] = set()
        self._spans: list[tuple[int, int]] = []

    def infos(
        self, pool: object, method: str, parts: Sequence[tuple[int, int]] = (), *, keep: bool = True
    ) -> list[Entry]:
        """The buffers that ``pool.method()`` lists; none if the pool lacks the method.

        Args:
            pool: Any object.
            method: Name of a method that returns three parallel lists: addresses, lengths, item sizes.
            parts: Offset and bytes of each buffer in the one envelope that is listed.
            keep: Whether the caller describes them.
        """
        entries = self._entries(pool, method)
        self._read.add((id(pool), method))
        if keep:
            self._spans += [(e.region.address, e.region.address + e.region.nbytes) for e in entries if e.region]
        if not parts or not entries:
            return entries
        if len(entries) != 1:
            raise refuse(pool, method, f"it lists {len(entries)} buffers, where one envelope was announced")
        envelope = entries[0]
        for offset, nbytes in parts:
            if offset < 0 or nbytes < 1 or offset + nbytes > envelope.nbytes:
                raise refuse(
                    pool,
                    method,
                    f"bytes [{offset}, {offset + nbytes}) do not lie in an envelope of {envelope.nbytes} bytes",
                )
        return [
            envelope.within(offset, nbytes)._replace(number=number) for number, (offset, nbytes) in enumerate(parts)
        ]

    def values(self, pool: object, method: str, entries: Sequence[Entry], infos: str) -> list[Any]:
        """A list with one value for each buffer; empty if the pool lacks the method."""
        given = _called(pool, method, ())
        values = list(given) if given is not None else []
        if values and len(values) != len(entries):
            raise refuse(pool, method, f"it has {len(values)} values for the {len(entries)} buffers of {infos}")
        return values

    def holds(self, entries: Iterable[Entry]) -> bool:
        """Whether all these bytes are in allocations that were read before."""
        return all(
            any(low <= e.region.address and e.region.address + e.region.nbytes <= high for low, high in self._spans)
            for e in entries
            if e.region
        )

    def nothing_left(self, pools: Iterable[object]) -> None:
        """Refuse lists that no component read, if they have bytes that no other list has."""
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
                        "describe the component with a constructor of statelink.state, and the pool without it",
                    )

    def _entries(self, pool: object, method: str, *, lacking: bool = False) -> list[Entry]:
        given = _called(pool, method, ((), (), ()), lacking=lacking)
        try:
            ptrs, lens, items = ([operator.index(value) for value in values] for values in given)
        except (TypeError, ValueError):
            raise refuse(
                pool, method, f"it returned {given!r:.80}; addresses, lengths and item sizes are expected"
            ) from None
        if not len(ptrs) == len(lens) == len(items):
            raise refuse(
                pool,
                method,
                f"its lists are of unequal length: {len(ptrs)} addresses, {len(lens)} lengths, {len(items)} item sizes",
            )
        return [self._entry(pool, method, i, *triple) for i, triple in enumerate(zip(ptrs, lens, items, strict=True))]

    def _entry(self, pool: object, method: str, number: int, ptr: int, nbytes: int, item: int) -> Entry:
        if min(nbytes, item) < 0:
            raise refuse(pool, method, f"entry {number} has {nbytes} bytes in items of {item}")
        if not nbytes:
            return Entry(number, 1, item, item, 0, None)
        if not ptr or not -(1 << 63) <= ptr <= MAX_UINT64 or not 0 < item <= nbytes:
            raise refuse(pool, method, f"entry {number} has {nbytes} bytes at {ptr:#x} in items of {item}")
        # Some accelerators set bit 63 of addresses, and some tensors hold addresses as signed numbers.
        ptr &= MAX_UINT64
        return Entry(number, ptr, item, item, nbytes // item, Region(ptr, nbytes, self._kind))


def _called(pool: object, method: str, default: Any, *, lacking: bool = False) -> Any:
    """The result of ``pool.method()``; ``default`` if the pool lacks it, or only a base class has it.

    Args:
        pool: Any object.
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
        if method not in PAGES and (isinstance(error, NotImplementedError) or (lacking and _lacks(error, pool))):
            return default
        raise refuse(pool, method, f"it raised {type(error).__name__}: {error}") from error


def _lacks(error: Exception, pool: object) -> bool:
    """Whether an error says that another object than this pool lacks a list."""
    name = error.name if isinstance(error, AttributeError) else None
    return isinstance(name, str) and _is_list(name) and name not in PAGES and getattr(error, "obj", pool) is not pool


def _is_list(method: str) -> bool:
    """Whether a method of this name lists buffers."""
    return method.startswith("get_") and method.endswith("_buf_infos")


def by_layer(
    pool: object, method: str, entries: Sequence[Entry], parts: Sequence[tuple[str, Sequence[int]]], hint: str = ""
) -> list[Named]:
    """Name the entries of a list in known order: tensor by tensor, with ascending layers in each.

    Args:
        pool: The pool of the list.
        method: The method that returned the list.
        entries: The list.
        parts: Each tensor in order, and the global layers that have it.
        hint: What to do if the list has another length.
    """
    expected = sum(len(layers) for _, layers in parts)
    if len(entries) != expected:
        said = ", then ".join(f"{part} of {len(layers)} layers" for part, layers in parts)
        raise refuse(pool, method, f"it lists {len(entries)} buffers; {said or 'nothing'} would be {expected}", hint)
    names = [(layer, part) for part, layers in parts for layer in layers]
    return [Named(layer, part, entry) for (layer, part), entry in zip(names, entries, strict=True)]


def by_id(
    pool: object,
    method: str,
    entries: Sequence[Entry],
    ids: Sequence[Any],
    parts: Mapping[int, Sequence[str]] | Sequence[str],
    span: tuple[int, int],
) -> list[Named]:
    """Name the entries of a list by their layer ids. An id comes once for each tensor of its layer.

    Args:
        pool: The pool of the list.
        method: The method that returned the list.
        entries: The list.
        ids: Global layer of each entry.
        parts: The tensors of each layer, in order; or of every layer.
        span: The layers that may be here.
    """
    layers = [operator.index(each) for each in ids]
    counts = Counter(layers)
    for layer, count in counts.items():
        if not span[0] <= layer < span[1]:
            raise refuse(pool, method, f"layer {layer} is not in [{span[0]}, {span[1]}), the layers of this rank")
        names = parts.get(layer, ()) if isinstance(parts, Mapping) else parts
        if count != len(names):
            raise refuse(
                pool,
                method,
                f"layer {layer} has {count} buffers; the geometry knows {len(names)} ({', '.join(names) or 'none'})",
            )
    seen: Counter[int] = Counter()
    found = []
    for layer, entry in zip(layers, entries, strict=True):
        names = parts[layer] if isinstance(parts, Mapping) else parts
        found.append(Named(layer, names[seen[layer]], entry))
        seen[layer] += 1
    return found


def band(ids: Sequence[Any], total: int) -> list[int]:
    """A draft's layer ids, renumbered after the model's layers in the order in which they first come."""
    first = {layer: number for number, layer in enumerate(dict.fromkeys(operator.index(each) for each in ids))}
    return [total + first[operator.index(each)] for each in ids]
