"""What a transfer should leave behind, worked out without Statelink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.helpers.pools import Aux, Component, Index, Kv, Mamba, Memory

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One request: which items of each side hold which of its positions.

    Attributes:
        room: Its id.
        tokens: N.
        prefix: P.
        source: Per component, prefill's items: of every page of the request, or the one that there is.
        target: Per component, decode's items: exactly those that must arrive.
    """

    room: int
    tokens: int
    prefix: int
    source: Mapping[str, list[int]]
    target: Mapping[str, list[int]]

    def span(self, first: int, last: int, pools: Sequence[Component]) -> dict[str, list[int]]:
        """The source's items of the positions ``[first, last)``, of those that must arrive."""
        found: dict[str, list[int]] = {}
        for pool in pools:
            if isinstance(pool, (Kv, Index)):
                start, _ = positions(pool, self.tokens, 0)
                start = max(start, first)
                pages = slice(start // pool.page, -(-last // pool.page))
                found[pool.name] = self.source[pool.name][pages] if start < last else []
            elif last == self.tokens:
                found[pool.name] = self.source[pool.name]
        return found

    def whole(self, pools: Sequence[Component]) -> dict[str, list[int]]:
        """All of the source's items that must arrive where decode has no prefix."""
        return self.span(0, self.tokens, pools)


def positions(pool: Kv | Index, tokens: int, prefix: int) -> tuple[int, int]:
    """Positions that must arrive."""
    if isinstance(pool, Kv) and pool.attention_chunk:
        seen = [t for t in range(prefix, tokens) if t // pool.attention_chunk == tokens // pool.attention_chunk]
        return (seen[0] if seen else tokens), tokens
    window = pool.window if isinstance(pool, Kv) else 0
    return (max(prefix, tokens - window) if window else prefix), tokens


def wanted(pool: Component, tokens: int, prefix: int | None = None) -> int:
    """How many items of a pool a request has, or those that must arrive where decode has a prefix."""
    if not isinstance(pool, (Kv, Index)):
        return 1
    first, last = (0, tokens) if prefix is None else positions(pool, tokens, prefix)
    return -(-last // pool.page) - first // pool.page if first < last else 0


def carry(sources: Sequence[Memory], target: Memory, case: Case) -> None:
    """Do by hand what a transfer does: fill the items of ``target`` from the ranks of the source."""
    for pool in target.pools:
        for label, there in target.arrays[pool.name].items():
            for source in sources:
                for other in source.pools:
                    if other.name == pool.name and label in source.arrays[other.name]:
                        _carry(other, pool, label, source.arrays[other.name][label], there, case)


def _carry(source: Component, target: Component, label: str, here: Array, there: Array, case: Case) -> None:
    if not len(here) or not len(there):
        return
    _, from_, to = np.intersect1d(held(source, label), held(target, label), return_indices=True)  # rows that both hold
    if isinstance(target, Mamba):
        there[case.target[target.name][0], to] = here[case.source[source.name][0], from_]
    elif isinstance(target, Aux):
        there[case.target[target.name][0]] = here[case.source[source.name][0]]
    else:
        assert isinstance(target, (Kv, Index))
        assert isinstance(source, (Kv, Index))
        first, last = positions(target, case.tokens, case.prefix)
        if first >= last:
            return
        pages = source.page, target.page
        moved = np.arange(max(first // n * n for n in pages), min(-(-last // n) * n for n in pages))
        start = first // target.page
        at = np.array(case.source[source.name])[moved // source.page]
        onto = np.array(case.target[target.name])[moved // target.page - start]
        if isinstance(target, Index) or isinstance(source, Index):
            there[onto, moved % target.page] = here[at, moved % source.page]
            return
        near = here if source.order == "nhd" else here.swapaxes(1, 2)
        far = there if target.order == "nhd" else there.swapaxes(1, 2)
        column = (slice(None), None)
        far[onto[column], (moved % target.page)[column], to] = near[at[column], (moved % source.page)[column], from_]


def held(pool: Component, label: str) -> Ints:
    """Which rows of the whole model each local row of the sharded axis is."""
    if isinstance(pool, Kv):
        rank, width = pool.tp
        each = max(pool.heads // width, 1)
        first = rank * each if width <= pool.heads else rank // (width // pool.heads)
        return np.arange(first, first + each)
    if isinstance(pool, Mamba):
        rank, width = pool.tp
        groups = pool.groups if label.endswith("conv") else (pool.heads,)
        starts = np.cumsum((0, *groups))
        shares = [np.arange(n // width) + start + rank * (n // width) for start, n in zip(starts, groups, strict=False)]
        return np.concatenate(shares)
    return np.arange(1)
