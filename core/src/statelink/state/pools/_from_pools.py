"""Turns an engine's pools into components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from statelink.errors import StateError
from statelink.state._requests import aux_rows

from ._families import describe_pool, family
from ._lists import Reader, has, refuse
from ._states import mamba
from ._walk import Walk

if TYPE_CHECKING:
    from statelink.state._build import Described

    from ._geometry import PoolGeometry

__all__ = ["from_pools"]


def from_pools(
    kv_pool: Any,
    *,
    geometry: PoolGeometry,
    request_pool: Any = None,
    draft_pool: Any = None,
    draft_geometry: PoolGeometry | None = None,
    draft_optional: bool = True,
    aux: Mapping[str, Any] | None = None,
    aux_optional: bool = False,
    aux_on_each_stage: bool = False,
) -> list[Described]:
    """Describe what an engine's pools hold, without knowing their classes.

    Pools are recognised by their methods, in the same order as in engines. Only addresses, lengths and item sizes are
    read. Nothing is imported, copied or kept. Buffers are named by global layer and tensor. Components come in this
    order: pages of full attention, the other state of the model, the draft's (named ``draft.*``), recurrent state that
    only the request pool knows of, metadata rows.

    Args:
        kv_pool: The pool of the model's pages.
        geometry: The whole model's numbers, and this rank's shares.
        request_pool: The pool of request slots. It is asked for recurrent state if ``kv_pool`` has none.
        draft_pool: The pool of a draft model or of next-token layers.
        draft_geometry: The draft's own numbers, with its layers counted from 0. The default is the model's geometry
            with the number of layers of the draft's pool. Needed if positions are dealt out over ranks (``cyclic``).
        draft_optional: Whether the other side may lack the draft. If it is false on prefill, a decode instance without
            a draft is a mismatch.
        aux: Metadata rows by name, as for `aux_rows`. Every TP rank has the same. On prefill only the last pipeline
            stage has them, as it samples the first token.
        aux_optional: Whether the other side may have no metadata rows.
        aux_on_each_stage: Whether this is a decode rank whose engine reads the rows on each of its stages. Each then
            has rows of its own.

    Raises:
        StateError: Something in a pool cannot be described. The error names the pool's class and the method.
    """
    reader = Reader(geometry.kind)
    target = Walk(kv_pool, geometry, reader)
    describe_pool(target)
    found = list(target.found)
    walks = [target]
    if draft_pool is not None:
        draft = _draft(target, draft_pool, draft_geometry, reader, draft_optional)
        found += draft.found
        walks.append(draft)
    if request_pool is not None:
        found += _fallback(target, request_pool, reader)
    if aux:
        if geometry.span[1] != geometry.layers and not aux_on_each_stage:
            raise StateError(
                "only the last pipeline stage has metadata rows",
                cause=f"this stage holds layers {geometry.span} of {geometry.layers}",
                hint="pass no aux on the other stages; on decode, say aux_on_each_stage if each of them reads the rows",
            )
        found.append(aux_rows(aux, replicated=True, optional=aux_optional, format=geometry.format))
    pools = [pool for walk in walks for pool in walk.pools()]
    reader.nothing_left([*pools, *([request_pool] if request_pool is not None else [])])
    return found


def _draft(target: Walk, pool: Any, given: PoolGeometry | None, reader: Reader, optional: bool) -> Walk:
    """Describe a draft's pool. Its layers get the numbers after the model's."""
    total = target.geometry.layers
    if given is None:
        layers = getattr(pool, "layer_num", None)
        if not layers:
            raise refuse(pool, "layer_num", "the number of draft layers is not known", "give draft_geometry")
        dealt = target.geometry.partition
        if dealt is not None and dealt.kind == "cyclic":
            raise refuse(
                pool,
                "get_contiguous_buf_infos",
                "the model's positions are dealt out over ranks, and nobody says whether the draft's are too",
                "give draft_geometry: without a partition, and with its own page size, where each rank has all of them",
            )
        given = msgspec.structs.replace(target.geometry, layers=layers, stage=None, kinds=())
    first, last = given.span
    shifted = msgspec.structs.replace(given, layers=total + given.layers, stage=(total + first, total + last), kinds=())
    kind = family(pool)
    draft = Walk(pool, shifted, reader, draft=total, optional=optional)
    if has(target.pool, "compression_ratios") or has(pool, "compression_ratios"):
        _expect_window_only(target.pool, pool, reader)
    elif kind in ("minimax", "swa"):
        raise refuse(
            pool,
            "get_state_buf_infos",
            f"a draft of kind {kind!r} beside a {family(target.pool)!r} model is not known",
            "describe it with a constructor of statelink.state",
        )
    elif kind == "hybrid" and reader.infos(pool, "get_state_buf_infos", keep=False):
        raise refuse(
            pool,
            "get_state_buf_infos",
            "the draft has recurrent state of its own: a second 'mamba' of one request has no slot",
        )
    describe_pool(draft)
    return draft


def _expect_window_only(target: Any, draft: Any, reader: Reader) -> None:
    """Check a draft beside a model with compressed attention. It may only have windows, in the target's form."""
    for pool, what in ((target, "the model"), (draft, "the draft")):
        if not has(pool, "compression_ratios"):
            raise refuse(pool, "compression_ratios", f"{what} has none, where the other pool has compressed attention")
    if any(draft.compression_ratios):
        raise refuse(
            draft,
            "compression_ratios",
            f"the draft is not sliding-window only: it has ratios {sorted(set(draft.compression_ratios))}",
        )
    names = ["page_size", "sliding_window", "unified_swa_window", "unified_swa_ring_size"]
    rings = [bool(reader.infos(pool, "get_unified_swa_ring_buf_infos", keep=False)) for pool in (target, draft)]
    if rings[0] != rings[1]:
        raise refuse(
            draft, "get_unified_swa_ring_buf_infos", "of the model and its draft, only one keeps its windows in rings"
        )
    for name in names:
        ours, theirs = getattr(draft, name, None), getattr(target, name, None)
        if ours != theirs:
            raise refuse(draft, name, f"it is {ours} for the draft, and {theirs} for the model")
    mapping = "full_to_swa_index_mapping"
    if not rings[0] and getattr(draft, mapping, None) is not getattr(target, mapping, None):
        raise refuse(draft, mapping, "the draft translates to the sliding pool in another way than the model")


def _fallback(target: Walk, pool: Any, reader: Reader) -> list[Described]:
    """Describe recurrent state that only the request pool lists. There is never a second component of it."""
    if "mamba" not in target.types:
        extra = Walk(target.pool, target.geometry, reader)
        mamba(extra, pool, ids=False)
        return extra.found
    if not reader.holds(reader.infos(pool, "get_state_buf_infos", keep=False)):
        raise refuse(
            pool,
            "get_state_buf_infos",
            f"it lists recurrent state that {type(target.pool).__name__} does not, and that would be left behind",
        )
    return []
