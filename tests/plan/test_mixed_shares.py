"""Ranks of one instance that share out positions in different ways: one holds all of them, others a part each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from statelink import plan, state
from statelink.state import Inventory, Partition

PAGE, TOKENS, WIDTH = 4, 37, 8
Pool = npt.NDArray[np.uint8]
Side = Sequence[Partition]
Built = tuple[list[Inventory], list[Pool], list[npt.NDArray[np.int64]]]

ALL = Partition()
CONTIGUOUS = tuple(Partition("contiguous", 2, part) for part in range(2))
CYCLIC = tuple(Partition("cyclic", 2, part, 1) for part in range(2))
PAGES = tuple(Partition("cyclic", 2, part, PAGE) for part in range(2))


def held(partition: Partition) -> list[int]:
    """Positions of a request that a rank holds, by the definition and without the planner."""
    pages = -(-TOKENS // PAGE)
    if partition.kind == "contiguous":
        # One run of pages each; the first ranks take what does not divide.
        each, more = divmod(pages, partition.size)
        bounds = [0]
        for part in range(partition.size):
            bounds.append(bounds[-1] + (each + (part < more)) * PAGE)
        return [p for p in range(TOKENS) if bounds[partition.index] <= p < bounds[partition.index + 1]]
    if partition.kind == "cyclic":
        return [p for p in range(TOKENS) if p // partition.block % partition.size == partition.index]
    return list(range(TOKENS))


def build(name: str, side: Side, rng: np.random.Generator, *, fill: bool) -> Built:
    inventories, pools, tables = [], [], []
    for rank, partition in enumerate(side):
        pool = np.zeros((16, PAGE, 1, WIDTH), np.uint8)
        mine = held(partition)
        ids = rng.permutation(16)[: -(-len(mine) // PAGE)]
        if fill:
            for place, position in enumerate(mine):
                pool[ids[place // PAGE], place % PAGE, 0] = position + 1
        pages = state.mla_pages({0: pool.reshape(16, PAGE, WIDTH)}, partition=partition)
        inventories.append(state.describe(name, [pages], rank=rank, ranks=len(side)))
        pools.append(pool)
        tables.append(ids)
    return inventories, pools, tables


@pytest.mark.parametrize("dealt", [CONTIGUOUS, CYCLIC, PAGES], ids=["contiguous", "cyclic", "pages"])
@pytest.mark.parametrize("first", [True, False], ids=["all first", "all last"])
@pytest.mark.parametrize("mixed", ["prefill", "decode", "both"])
def test_every_position_has_one_writer(dealt: Side, first: bool, mixed: str) -> None:
    rng = np.random.default_rng(7)
    both = (ALL, *dealt) if first else (*dealt, ALL)
    sources, theirs, there = build("p", both if mixed != "decode" else (ALL,), rng, fill=True)
    targets, ours, here = build("d", both if mixed != "prefill" else (ALL,), rng, fill=False)
    written = [np.zeros(pool.nbytes, np.int64) for pool in ours]
    for assignment in plan.route(sources, targets):
        pair = plan.compile_pair(sources[assignment.source], targets[assignment.target], assignment)
        for part in pair.components.values():
            pushed = plan.pushed(part.source, TOKENS, None, (0, TOKENS), there[assignment.source])
            wanted = plan.required(part.target, TOKENS, 0, here[assignment.target])
            owed = plan.due(part.source, part.target, TOKENS, 0)
            source, target = theirs[assignment.source], ours[assignment.target]
            for blocks in plan.plan_move(part, pushed, wanted, owed).blocks():
                for low, to, count in zip(
                    blocks.source.tolist(), blocks.target.tolist(), blocks.nbytes.tolist(), strict=True
                ):
                    begin, at = low - source.ctypes.data, to - target.ctypes.data
                    target.reshape(-1)[at : at + count] = source.reshape(-1)[begin : begin + count]
                    written[assignment.target][at : at + count] += 1
    for rank, (inventory, pool, ids) in enumerate(zip(targets, ours, here, strict=True)):
        for place, position in enumerate(held(inventory.components[0].partition)):
            at = ids[place // PAGE], place % PAGE, 0
            assert (pool[at] == position + 1).all(), f"position {position} of rank {rank}"
        assert written[rank].max() == 1
