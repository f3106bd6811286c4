"""Computes which rank sends what to which rank for one request, and in how many blocks."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from statelink.errors import ConfigError
from statelink.plan import (
    ComponentPlan,
    Items,
    checked_int,
    compile_pair,
    due,
    indices_of,
    match,
    plan_move,
    pushed,
    required,
    route,
)
from statelink.state import Component, Coverage, IndexSpace, Inventory

from ._inventories import inventories

if TYPE_CHECKING:
    from ._layout import Side

__all__ = ["Flow", "Rank", "Report", "Total", "explain"]

TINY = 4096
"""Mean block size, in bytes, below which the number of blocks bounds a library's speed."""
STAGED = "'staging' in both links' configuration gathers them into large blocks"
"""What helps wherever blocks are small."""
FEW_BLOCKS = 64
"""Most blocks for which their size does not matter."""


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What one source rank sends of one component to one destination rank.

    Attributes:
        source: Rank of prefill.
        target: Rank of decode.
        component: Name of the component.
        nbytes: Payload.
        blocks: Number of blocks if the pages of both sides are consecutive.
        blocks_random: Number of blocks if the pages of both sides are scattered over their pools.
        mark: A warning about small blocks; empty for none.
    """

    source: int
    target: int
    component: str
    nbytes: int
    blocks: int
    blocks_random: int
    mark: str = ""


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """One component, over all pairs of ranks.

    Attributes:
        component: Its name.
        type: Its state type.
        nbytes: Payload.
        blocks: Number of blocks with consecutive pages.
        blocks_random: Number of blocks with scattered pages.
    """

    component: str
    type: str
    nbytes: int
    blocks: int
    blocks_random: int


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one side.

    Attributes:
        rank: Its number.
        axes: Its coordinates on the parallel axes that have several ranks.
        nbytes: Bytes that it sends (prefill) or receives (decode).
        told_by: For a source that writes nothing, the destination that tells it so.
    """

    rank: int
    axes: dict[str, int]
    nbytes: int
    told_by: int | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one request costs.

    Attributes:
        model: The model's name.
        tokens: Tokens of the prompt.
        prefix: Tokens that decode holds.
        nbytes: Payload of all pairs together.
        prefill: Every rank of prefill, and what it sends.
        decode: Every rank of decode, and what it receives.
        totals: By component.
        flows: By pair of ranks and component, without empty ones.
    """

    model: str
    tokens: int
    prefix: int
    nbytes: int
    prefill: tuple[Rank, ...]
    decode: tuple[Rank, ...]
    totals: tuple[Total, ...]
    flows: tuple[Flow, ...]


def explain(prefill: Side, decode: Side, *, tokens: int, prefix: int = 0) -> Report:
    """Match, route and compile two sides like links that connect, and plan one request between them.

    Raises:
        MismatchError: The sides cannot work together. Links that connect would raise the same error.
        StateError: A side's model cannot be spread over its ranks.
        RoomError: The prefix ends inside a page, or is longer than the request.
        ConfigError: The request does not fit into a side's pools.
    """
    checked_int(prefix, "the prefix", 0, tokens, code="room.prefix")
    sources, targets = inventories(prefill), inventories(decode)
    match(sources, targets)
    theirs, ours = _Request(prefill, tokens, prefix, role=0), _Request(decode, tokens, prefix, role=1)
    flows: list[Flow] = []
    idle: dict[int, int] = {}
    counted: dict[Any, tuple[int, int, int]] = {}
    for assignment in route(sources, targets):
        source, target = sources[assignment.source], targets[assignment.target]
        if not assignment.shares:
            idle[source.rank] = target.rank
        for name, plan in compile_pair(source, target, assignment).components.items():
            key = _geometry(plan)
            if key not in counted:
                counted[key] = (*_counts(plan, theirs, ours, random=False), _counts(plan, theirs, ours, random=True)[1])
            nbytes, blocks, scattered = counted[key]
            if nbytes:
                mark = _mark(plan, prefill, decode, nbytes, blocks, scattered)
                flows.append(
                    Flow(
                        source=source.rank,
                        target=target.rank,
                        component=name,
                        nbytes=nbytes,
                        blocks=blocks,
                        blocks_random=scattered,
                        mark=mark,
                    )
                )
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for flow in flows:
        sent[flow.source] += flow.nbytes
        received[flow.target] += flow.nbytes
    return Report(
        model=prefill.model.name,
        tokens=tokens,
        prefix=prefix,
        nbytes=sum(sent.values()),
        prefill=_ranks(sources, sent, idle),
        decode=_ranks(targets, received, {}),
        totals=_totals(targets, flows),
        flows=tuple(flows),
    )


class _Request:
    """The items of one request on one side. All ranks of a side have the same page tables."""

    def __init__(self, side: Side, tokens: int, prefix: int, role: int) -> None:
        self.side = side
        self.tokens = tokens
        self.prefix = prefix
        self.role = role

    def items(self, component: Component, *, random: bool) -> Items:
        """On decode, the items that must arrive. On prefill, the items of a push of the whole request."""
        decode = self.role == 1
        # A push may name the items of the prefix, too, which do not move: prefill's pages need not end where it ends.
        ids = indices_of(component, self.tokens, self.prefix if decode else 0, **self._tables(component, random))
        if decode:
            return required(component, self.tokens, self.prefix, ids)
        return pushed(component, self.tokens, self.prefix, (0, self.tokens), ids)

    def _tables(self, component: Component, random: bool) -> dict[str, Any]:
        layout, kind = self.side.layout, component.kind
        rng = np.random.default_rng([self.role, zlib.crc32(component.name.encode())])
        slot = int(rng.integers(layout.slots)) if random else 0
        if kind.index is IndexSpace.RING:
            return {"slot": slot, "ring": layout.c4_ring}
        if kind.coverage is Coverage.TAIL:
            return {"slot": slot, "ring": layout.c128_ring}
        if not kind.positional:
            return {"slot": slot}
        pool = min(buffer.count for buffer in component.buffers)
        kept = component.group if kind.coverage is Coverage.OPEN else component.window
        held = self.tokens if kept is None else min(self.tokens, kept + component.page)
        if -(-held // component.page) > pool:
            raise ConfigError(
                f"a request of {self.tokens} tokens does not fit into the pool of component {component.name!r}",
                cause=f"it has {pool} pages of {component.page} tokens",
                hint="raise 'pool_tokens' in the layout",
                instance=self.side.instance,
            )
        numbers = np.arange(-(-self.tokens // component.page), dtype=np.int64) % pool
        # A pool of windows is a ring. Consecutive pages must not wrap around inside a window.
        return {"pages": rng.permutation(pool)[numbers] if random else numbers}


def _counts(plan: ComponentPlan, theirs: _Request, ours: _Request, *, random: bool) -> tuple[int, int]:
    """Bytes and blocks of one component between two ranks."""
    owed = due(plan.source, plan.target, ours.tokens, ours.prefix)
    move = plan_move(plan, theirs.items(plan.source, random=random), ours.items(plan.target, random=random), owed)
    return move.nbytes, sum(batch.count for batch in move.blocks())


def _geometry(plan: ComponentPlan) -> Any:
    """Everything on which the number of blocks depends: all but addresses."""
    groups = tuple(
        (len(group.source), group.source_stride, group.target_stride, *(part.tobytes() for part in group.runs))
        for group in plan.fused
    )
    return plan.target.name, plan.source.partition, plan.target.partition, groups


def _mark(plan: ComponentPlan, prefill: Side, decode: Side, nbytes: int, blocks: int, scattered: int) -> str:
    if scattered <= FEW_BLOCKS or nbytes >= TINY * scattered:
        return ""
    if nbytes >= TINY * blocks or blocks <= FEW_BLOCKS:
        return f"small pages: {nbytes // scattered} bytes a block where pages are scattered; {STAGED}"
    runs = max(len(group.runs.nbytes) for group in plan.groups)
    per = "item"
    if plan.target.kind.positional:
        whole = runs % plan.granule == 0
        runs, per = (runs // plan.granule, "token") if whole else (runs, f"{plan.granule} tokens")
    sizes = {int(size) for group in plan.groups for size in group.runs.nbytes}
    number = "one block" if runs == 1 else f"{runs} blocks"
    text = f"shatters: {number} per {per} and buffer, {'some ' * (len(sizes) > 1)}of {min(sizes)} bytes"
    orders = prefill.layout.order, decode.layout.order
    if not any("head" in buffer.layout.axes for buffer in plan.target.buffers):
        return f"{text}; {STAGED}"
    if orders[0] != orders[1]:
        return f"{text}; pages of one order on both sides move in larger ones, or {STAGED}"
    if orders[0] == "nhd" and prefill.layout.tp != decode.layout.tp:
        return f"{text}; equal tp, or order 'hnd' on both sides, moves in larger ones, or {STAGED}"
    return f"{text}; {STAGED}"


def _ranks(sides: Sequence[Inventory], nbytes: dict[int, int], idle: dict[int, int]) -> tuple[Rank, ...]:
    return tuple(
        Rank(
            rank=each.rank,
            axes={name: axis.index for name, axis in each.axes.items()},
            nbytes=nbytes.get(each.rank, 0),
            told_by=idle.get(each.rank),
        )
        for each in sides
    )


def _totals(targets: Sequence[Inventory], flows: Sequence[Flow]) -> tuple[Total, ...]:
    types = {component.name: component.kind.name for target in targets for component in target.components}
    found = []
    for name, kind in types.items():
        mine = [flow for flow in flows if flow.component == name]
        found.append(
            Total(
                component=name,
                type=kind,
                nbytes=sum(flow.nbytes for flow in mine),
                blocks=sum(flow.blocks for flow in mine),
                blocks_random=sum(flow.blocks_random for flow in mine),
            )
        )
    return tuple(found)
