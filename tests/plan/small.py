"""Small instances at round addresses, for tests whose numbers are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from statelink import plan, state
from statelink.state import Inventory, Memory

__all__ = ["STEP", "Moved", "at", "describe", "keys", "moves", "pointer", "ranks", "runs"]

STEP = 1 << 40
"""Distance of two allocations; far more than any of them is long."""

Moved = tuple[int, int, int]
"""Source, target, bytes."""


class _At(NamedTuple):
    array: int
    offset: int


def at(address: int) -> _At:
    """Which array an address is in, and where."""
    return _At(address // STEP, address % STEP)


def pointer(number: int, *shape: int, itemsize: int = 1, dtype: str = "uint8") -> Memory:
    """Array ``number``, alone in its allocation."""
    return Memory.pointer(number * STEP, shape, dtype, itemsize)


def keys(
    layers: Iterable[int], pages: int, page: int, local: int, dim: int, *, itemsize: int = 1, **fields: Any
) -> state.Described:
    """Keys and values as engines list them: arrays 1, 2, ... are the keys of all layers, then the values."""
    numbers = list(layers)
    shape = (pages, local, page, dim) if fields.get("order") == "hnd" else (pages, page, local, dim)
    dtype = {1: "uint8", 2: "bfloat16"}[itemsize]
    arrays = {
        layer: (
            pointer(1 + place, *shape, itemsize=itemsize, dtype=dtype),
            pointer(1 + len(numbers) + place, *shape, itemsize=itemsize, dtype=dtype),
        )
        for place, layer in enumerate(numbers)
    }
    return state.kv_pages(arrays, **fields)


def describe(instance: str, *described: state.Described, rank: int = 0, ranks: int = 1, model: str = "") -> Inventory:
    return state.describe(instance, described, rank=rank, ranks=ranks, model=model)


def ranks(instance: str, width: int, make: Callable[[int], state.Described]) -> list[Inventory]:
    """One inventory for each TP rank."""
    return [describe(instance, make(rank), rank=rank, ranks=width) for rank in range(width)]


def moves(
    source: Inventory,
    target: Inventory,
    assignment: plan.Assignment,
    component: str,
    ids: tuple[Any, Any],
    *,
    tokens: int = 1,
    prefix: int = 0,
    layers: tuple[int, int] | None = None,
    max_blocks: int = 1 << 18,
) -> list[Moved]:
    """All blocks of one push that covers the whole request."""
    compiled = plan.compile_pair(source, target, assignment).components[component]
    items = plan.pushed(compiled.source, tokens, prefix, (0, tokens), ids[0])
    wanted = plan.required(compiled.target, tokens, prefix, ids[1])
    move = plan.plan_move(compiled, items, wanted, plan.due(compiled.source, compiled.target, tokens, prefix), layers)
    blocks = list(move.blocks(max_blocks))
    assert sum(batch.total for batch in blocks) == move.nbytes
    assert all(batch.count <= max_blocks for batch in blocks)
    joined = plan.Blocks.concatenate(blocks)
    return list(zip(joined.source.tolist(), joined.target.tolist(), joined.nbytes.tolist(), strict=True))


def runs(found: Iterable[Moved], array: int) -> list[Moved]:
    """Offsets of those blocks that go into one array of the destination."""
    return [(at(s).offset, at(t).offset, n) for s, t, n in found if at(t).array == array]
