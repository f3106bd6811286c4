"""Builds the inventories of all ranks of one side, with invented addresses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from statelink.errors import StateError
from statelink.state import (
    Coverage,
    Described,
    Inventory,
    Memory,
    Partition,
    aux_rows,
    compressed_pages,
    describe,
    kv_pages,
    mamba_slots,
    mla_pages,
    planar_pages,
    ring_rows,
    whole_items,
)

from ._model import SIZES, Attention, Compressed, Index, Mamba

if TYPE_CHECKING:
    from ._layout import Side

__all__ = ["inventories"]

ALIGNMENT = 1 << 21


def inventories(side: Side) -> list[Inventory]:
    """The inventory of every rank of ``side``, in order of rank. Nothing is allocated.

    Raises:
        StateError: The model cannot be spread over this many ranks. The error names the side.
    """
    try:
        return [_Rank(side, rank).inventory() for rank in range(side.layout.ranks)]
    except StateError as error:
        hint = error.hint
        if error.code == "state.shares":  # its own hint is for whoever calls the constructors
            said = f"'tp' in [layout] is {side.layout.tp}"
            hint = f"{said}: choose one that divides these numbers, or one that they divide"
        who = {**error.reason.who, "instance": side.instance, **({"file": side.file} if side.file else {})}
        raise StateError.of(msgspec.structs.replace(error.reason, who=who, hint=hint)) from None


class _Rank:
    """One rank that is being described."""

    def __init__(self, side: Side, rank: int) -> None:
        layout = side.layout
        self.side = side
        self.rank = rank
        self.tp = (rank % layout.tp, layout.tp)
        self.cp = (rank // layout.tp % layout.cp, layout.cp)
        self.pp = (rank // layout.tp // layout.cp, layout.pp)
        # Context-parallel ranks share the pages of full attention. Everything else is the same on each of them.
        self.alike = layout.cp > 1
        self.address = ALIGNMENT

    def inventory(self) -> Inventory:
        layout = self.side.layout
        axes = {"pp": self.pp, "cp": self.cp, "tp": self.tp}
        return describe(
            self.side.instance,
            [self._spread(each) for each in self._components()],
            rank=self.rank,
            ranks=layout.ranks,
            axes={name: axis for name, axis in axes.items() if axis[1] > 1},
            model=self.side.model.name,
        )

    def _components(self) -> Iterator[Described]:
        model, layout, page = self.side.model, self.side.layout, self.side.page
        layers: dict[str, list[int]] = defaultdict(list)
        for layer in self.side.stage(self.pp[0]):
            for kind in model.kinds(layer):
                layers[kind].append(layer)
        shared: dict[str, Any] = {"tp": self.tp, "order": layout.order, "replicated": self.alike}
        if model.attention is not None and layers["full"]:
            full = self._heads(model.attention, page, layers["full"])
            yield kv_pages(full, heads=model.attention.heads, **shared)
        if model.latent is not None and layers["full"]:
            shape = (self._pages(page), page, model.latent.width)
            yield mla_pages({n: self._array(shape, self.side.dtype) for n in layers["full"]})
        if model.index is not None and layers["index"]:
            yield self._index(model.index, layers["index"])
        if (window := model.window) is not None and layers["window"]:
            rows = self._heads(window, self.side.window_page, layers["window"])
            yield kv_pages(rows, heads=window.heads, window=window.tokens, **shared)
        if (chunk := model.chunk) is not None and layers["chunk"]:
            rows = self._heads(chunk, self.side.window_page, layers["chunk"])
            yield kv_pages(rows, heads=chunk.heads, attention_chunk=chunk.tokens, **shared)
        if model.mamba is not None and layers["mamba"]:
            yield self._mamba(model.mamba, layers["mamba"])
        if model.compressed is not None and layers["compressed"]:
            yield from self._compressed(model.compressed, layers["compressed"])
        if layout.aux_bytes and self.pp[0] == layout.pp - 1:
            yield aux_rows({"row": self._array((layout.slots, layout.aux_bytes), "uint8")}, replicated=True)

    def _heads(self, given: Attention, page: int, layers: Sequence[int]) -> dict[int, tuple[Memory, Memory]]:
        widths = (given.dim, given.value_dim or given.dim)
        return {layer: self._pair(page, given.heads, widths) for layer in layers}

    def _index(self, given: Index, layers: Sequence[int]) -> Described:
        page, dtype = self.side.page, given.dtype or self.side.dtype
        row = given.width * SIZES[dtype]
        fields = [("index_k", row), ("scale", given.scale)][: 1 + bool(given.scale)]
        return planar_pages(
            {n: self._array((self._pages(page), page * (row + given.scale)), "uint8") for n in layers},
            fields=fields,
            name=given.type,
            type=given.type,
            replicated=True,
            format=dtype,
        )

    def _mamba(self, given: Mamba, layers: Sequence[int]) -> Described:
        layout = self.side.layout
        conv: tuple[int, ...] = ()
        if given.kernel is not None:
            channels = sum(width // heads * self._share(heads) for width, heads in given.conv)
            inner = (given.kernel - 1, channels) if layout.transposed else (channels, given.kernel - 1)
            conv = (layout.slots, *inner)
        state = (layout.slots, self._share(given.state[0]), *given.state[1:]) if given.state else ()
        return mamba_slots(
            conv={n: self._array(conv, self.side.conv_dtype) for n in layers} if conv else {},
            ssm={n: self._array(state, self.side.state_dtype) for n in layers} if state else {},
            conv_groups=given.conv or None,
            heads=given.state[0] if given.state else 0,
            tp=self.tp,
            transposed=layout.transposed,
            replicated=self.alike,
        )

    def _compressed(self, given: Compressed, layers: Sequence[int]) -> Iterator[Described]:
        layout, page, window = self.side.layout, self.side.page, self.side.window_page
        pages = self._pages(page)
        quarter = [n for n in layers if given.ratios[n] == 4]
        coarse = [n for n in layers if given.ratios[n] == 128]
        pools = {n: {"kv": self._array((pages, page // given.ratios[n], given.width), self.side.dtype)} for n in coarse}
        for n in quarter:
            widths = {"kv": given.width, "index_k": given.index_width}
            pools[n] = {part: self._array((pages, page // 4, width), self.side.dtype) for part, width in widths.items()}
        if pools:
            yield compressed_pages(dict(sorted(pools.items())), page=page, replicated=True)
        shape = (self._pages(window), window, given.width)
        sliding = {n: {"kv": self._array(shape, self.side.dtype)} for n in layers}
        yield compressed_pages(sliding, page=window, name="swa", type="swa", window=given.window, replicated=True)
        if quarter:
            # A row is a key and its score. Groups of ratio 4 overlap the group before, which doubles both.
            widths = {"kv": 4 * given.width, "index_k": 4 * given.index_width}
            rows = (layout.slots, layout.c4_ring)
            rings = {n: {p: self._array((*rows, w), self.side.state_dtype) for p, w in widths.items()} for n in quarter}
            yield ring_rows(rings, type="dsv4_c4_state", group=4, keep=4, replicated=True)
        if coarse:
            shape = (layout.slots * (layout.c128_ring // 128), 128, 2 * given.width)
            items = {f"layers.{n}.state": self._array(shape, self.side.state_dtype) for n in coarse}
            numbers = {f"layers.{n}.state": n for n in coarse}
            yield whole_items(items, type="c128_state", layers=numbers, page=128, group=128, replicated=True)

    def _spread(self, described: Described) -> Described:
        """The positions that this rank holds. Context parallelism spreads the pages of full attention."""
        layout, component = self.side.layout, described.component
        if component.kind.coverage is not Coverage.SUFFIX or layout.cp == layout.dcp == 1:
            return described
        if layout.cp > 1:
            partition = Partition("contiguous", layout.cp, self.cp[0])
        else:
            partition = Partition("cyclic", layout.dcp, self.tp[0] % layout.dcp, layout.dcp_block)
        return described._replace(component=msgspec.structs.replace(component, partition=partition))

    def _pair(self, tokens: int, heads: int, widths: tuple[int, int]) -> tuple[Memory, Memory]:
        layout, held = self.side.layout, self._share(heads)
        inner = (tokens, held) if layout.order == "nhd" else (held, tokens)
        pages = self._pages(tokens)
        return (
            self._array((pages, *inner, widths[0]), self.side.dtype),
            self._array((pages, *inner, widths[1]), self.side.dtype),
        )

    def _share(self, units: int) -> int:
        """How many of ``units`` this rank holds. The constructors refuse uneven shares."""
        return max(1, units // self.tp[1])

    def _pages(self, tokens: int) -> int:
        return max(1, self.side.layout.pool_tokens // tokens)

    def _array(self, shape: tuple[int, ...], dtype: str) -> Memory:
        address = self.address
        self.address += -(-math.prod(shape) * SIZES[dtype] // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        return Memory.pointer(address, shape, dtype, SIZES[dtype])
