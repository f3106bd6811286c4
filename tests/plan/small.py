"""Small instances at round addresses, for tests whose numbers are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from statelink import plan, state
from statelink.state import Described, Inventory, Memory, Partition

STEP = 1 << 40
"""Distance of two allocations; far more than any of them is long."""

Moved = tuple[int, int, int]
"""Source, target, bytes."""


def pointer(number: int, *shape: int, itemsize: int = 1, dtype: str = "uint8") -> Memory:
    """Array ``number``, alone in its allocation."""
    return Memory.pointer(number * STEP, shape, dtype, itemsize)


def keys(
    layers: Iterable[int], pages: int, page: int, local: int, dim: int, *, itemsize: int = 1, **fields: Any
) -> Described:
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


def describe(instance: str, *described: Described, rank: int = 0, ranks: int = 1, model: str = "") -> Inventory:
    return state.describe(instance, described, rank=rank, ranks=ranks, model=model)


def ranks(instance: str, width: int, make: Callable[[int], Described]) -> list[Inventory]:
    """One inventory for each TP rank."""
    return [describe(instance, make(rank), rank=rank, ranks=width) for rank in range(width)]


def instance_of(
    name: str, *ranks: Sequence[Described], axes: Sequence[dict[str, tuple[int, int]]] = ()
) -> list[Inventory]:
    """One inventory for each list of components."""
    return [
        state.describe(name, parts, rank=rank, ranks=len(ranks), axes=axes[rank] if axes else None)
        for rank, parts in enumerate(ranks)
    ]


def kv_share(rank: int = 0, width: int = 1, layers: Sequence[int] = (0,), **fields: Any) -> Described:
    """A rank's keys and values of four heads."""
    return keys(layers, 4, 2, 4 // width, 3, heads=4, tp=(rank, width), **fields)


def ring_share(rank: int = 0, width: int = 1, heads: int = 4, **fields: Any) -> Described:
    """A ring of keys and values of a sliding window, by head."""
    arrays = {part: pointer(10 + n, 3, 8, max(1, heads // width), 2) for n, part in enumerate("kv")}
    return state.ring_rows({0: arrays}, type="swa_ring", window=4, heads=heads, tp=(rank, width), **fields)


def row(**fields: Any) -> Described:
    return state.aux_rows({"row": pointer(20, 3, 5)}, **fields)


def latents_share(index: int, size: int, **fields: Any) -> Described:
    return state.mla_pages({0: pointer(30, 4, 2, 3)}, partition=Partition("cyclic", size, index, 2), **fields)


def moves(
    source: Inventory,
    target: Inventory,
    assignment: plan.Assignment | None,
    component: str,
    ids: tuple[Any, Any],
    *,
    tokens: int = 1,
    prefix: int = 0,
    layers: tuple[int, int] | None = None,
    max_blocks: int = 1 << 18,
) -> list[Moved]:
    """All blocks of one push that covers the whole request; without an assignment, of the only one there is."""
    if assignment is None:
        (assignment,) = (part for part in plan.route([source], [target]) if part.shares)
    compiled = plan.compile_pair(source, target, assignment).components[component]
    items = plan.pushed(compiled.source, tokens, prefix, (0, tokens), ids[0])
    wanted = plan.required(compiled.target, tokens, prefix, ids[1])
    move = plan.plan_move(compiled, items, wanted, plan.due(compiled.source, compiled.target, tokens, prefix), layers)
    blocks = list(move.blocks(max_blocks))
    assert sum(batch.total for batch in blocks) == move.nbytes
    assert all(batch.count <= max_blocks for batch in blocks)
    joined = plan.Blocks.concatenate(blocks)
    return list(zip(joined.source.tolist(), joined.target.tolist(), joined.nbytes.tolist(), strict=True))
