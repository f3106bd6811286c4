"""Pools of every built-in state type, on ranks of any width. Plain numpy fills and compares them.

An item is identified by its distance from the end of its component's list, which is the same on both sides for any
prefix. Its bytes are cut out of the whole model's item, so ranks of unequal width hold different parts of one item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import statelink
from statelink import state

from ._memory import POISON, Array

if TYPE_CHECKING:
    from statelink._devices import DeviceMemory

    from ._worker import Host

__all__ = ["LABELS", "PREFIX", "TOKENS", "HeldState", "Stock", "fill", "judge", "make"]

TOKENS, PREFIX, PAGE = 75, 16, 8
POOL, SLOTS, LAYERS = 24, 5, (0, 3)
HEADS, GROUPS = 4, (8, 8, 16)

Cut = Callable[[Array], Array]
"""Cuts a rank's part out of the whole model's item."""


class Built(NamedTuple):
    """One component.

    Attributes:
        described: What Statelink is told.
        pools: Its arrays, items first.
        cuts: For each array, the shape of the whole model's item, and this rank's part of it.
        needs: Further arguments of `statelink.indices_of` for its indices.
    """

    described: state.Described
    pools: list[Array]
    cuts: list[tuple[tuple[int, ...], Cut]]
    needs: dict[str, Any]


class HeldState(NamedTuple):
    """One component of one rank in one request.

    Attributes:
        described: What Statelink is told.
        pools: Its arrays, items first.
        cuts: As in `Built`.
        ids: Where the request's items are.
    """

    described: state.Described
    pools: list[Array]
    cuts: list[tuple[tuple[int, ...], Cut]]
    ids: npt.NDArray[np.int64]


class Stock:
    """The memory of a rank's pools: numpy arrays on the host, or device memory with an array for each pool.

    Args:
        host: The process that holds them; memory of this one's host if not given.
    """

    def __init__(self, host: Host | None = None) -> None:
        self._kind = host.kind if host is not None else "dram"
        self._allocate = host.allocate if host is not None else None
        self._placed: list[tuple[Array, DeviceMemory]] = []

    def place(self, arrays: Any) -> Any:
        """The memory of arrays for Statelink, in the same dicts and tuples."""
        if self._allocate is None:
            return arrays
        if isinstance(arrays, dict):
            return {key: self.place(each) for key, each in arrays.items()}
        if isinstance(arrays, tuple):
            return tuple(map(self.place, arrays))
        memory = self._allocate(max(arrays.size, 1))
        if arrays.size:
            memory.write(0, arrays)
        self._placed.append((arrays, memory))
        return state.Memory.pointer(memory.address, arrays.shape, "uint8", 1, kind=self._kind)

    def upload(self) -> None:
        """Copy every array to its device."""
        for array, memory in self._placed:
            if array.size:
                memory.write(0, array)

    def download(self) -> None:
        """Copy the device's bytes to every array."""
        for array, memory in self._placed:
            if array.size:
                memory.read(0, array)


class Maker:
    """Makes a rank's components.

    Args:
        rank: Number of the rank.
        width: Number of ranks.
        ring: Rows of a ring.
        stock: Memory of the pools.
    """

    def __init__(self, rank: int, width: int, ring: int, stock: Stock) -> None:
        self.tp = (rank, width)
        self.ring = ring
        self.place = stock.place

    def heads(self, axis: int, whole: tuple[int, ...]) -> tuple[tuple[int, ...], Cut]:
        """A part of an axis that is dealt out evenly."""
        rank, width = self.tp
        return whole, lambda item: np.split(item, width, axis)[rank]

    def paged(self, make: Any, name: str, order: str = "nhd", **options: Any) -> Built:
        """Pages of keys and values, whose heads are dealt out."""
        whole, axis = ((PAGE, HEADS, 6), 1) if order == "nhd" else ((HEADS, PAGE, 6), 0)
        local = tuple(size // (self.tp[1] if at == axis else 1) for at, size in enumerate(whole))
        arrays = {layer: (_pool(POOL, *local), _pool(POOL, *local)) for layer in LAYERS}
        described = make(self.place(arrays), heads=HEADS, tp=self.tp, order=order, name=name, **options)
        pools = _flat(arrays)
        return Built(described, pools, [self.heads(axis, whole) for _ in pools], {"pages": True})

    def mamba(self) -> Built:
        """Recurrent state, whose channels are dealt out group by group."""
        rank, width = self.tp
        conv = {n: _pool(SLOTS, sum(GROUPS) // width, 3) for n in LAYERS}
        ssm = {n: _pool(SLOTS, HEADS // width, 6, 5) for n in LAYERS}
        described = state.mamba_slots(
            conv=self.place(conv), ssm=self.place(ssm), conv_groups=GROUPS, heads=HEADS, tp=self.tp
        )

        def grouped(item: Array) -> Array:
            parts = np.split(item, np.cumsum(GROUPS)[:-1])
            return np.concatenate([np.split(part, width)[rank] for part in parts])

        cuts: list[tuple[tuple[int, ...], Cut]] = [((sum(GROUPS), 3), grouped) for _ in LAYERS]
        cuts += [self.heads(0, (HEADS, 6, 5)) for _ in LAYERS]
        return Built(described, [*conv.values(), *ssm.values()], cuts, {})

    def same(self, described: state.Described, pools: list[Array], **needs: Any) -> Built:
        """State that every rank holds completely."""
        return Built(described, pools, [(array.shape[1:], _whole) for array in pools], needs)

    def ring_of_heads(self) -> Built:
        """Rings of keys and values, whose heads are dealt out."""
        local = HEADS // self.tp[1]
        arrays = {n: {part: _pool(SLOTS, self.ring, local, 6) for part in "kv"} for n in LAYERS}
        described = state.ring_rows(self.place(arrays), type="swa_ring", window=14, heads=HEADS, tp=self.tp)
        pools = [array.reshape(-1, local, 6) for array in _flat(arrays)]
        return Built(described, pools, [self.heads(0, (HEADS, 6)) for _ in pools], {"ring": self.ring})

    def rows(self, type: str, **options: Any) -> Built:
        """Rings of rows that every rank holds completely."""
        arrays = {layer: {"a": _pool(SLOTS, self.ring, 12), "b": _pool(SLOTS, self.ring, 12)} for layer in LAYERS}
        pools = [array.reshape(-1, array.shape[-1]) for array in _flat(arrays)]
        described = state.ring_rows(self.place(arrays), type=type, replicated=True, **options)
        return self.same(described, pools, ring=self.ring)

    def items(self, type: str, count: int = SLOTS, **options: Any) -> Built:
        """Items that move whole."""
        arrays = {"a": _pool(count, 40), "b": _pool(count, 3, 5)}
        needs = {"pages": True} if "page" in options else {}
        described = state.whole_items(self.place(arrays), type=type, replicated=True, **options)
        return self.same(described, list(arrays.values()), **needs)

    def latent(self) -> Built:
        """Pages of latents."""
        arrays = {n: _pool(POOL, PAGE, 20) for n in LAYERS}
        return self.same(state.mla_pages(self.place(arrays), name="mla"), _flat(arrays), pages=True)

    def index(self, type: str) -> Built:
        """Index keys. For ``dsa``, one layer shares another layer's and has none."""
        arrays = {0: _pool(POOL, PAGE, 9), 1: np.empty((0, PAGE, 9), np.uint8), 3: _pool(POOL, PAGE, 9)}
        kept = {n: array for n, array in arrays.items() if len(array) or type == "dsa"}
        return self.same(
            state.index_pages(self.place(kept), name=type, type=type),
            [a for a in arrays.values() if len(a)],
            pages=True,
        )

    def compressed(self, type: str) -> Built:
        """Pages of compressed rows."""
        arrays = {n: {"c4": _pool(POOL, PAGE // 4, 10), "c8": _pool(POOL, 1, 7)} for n in LAYERS}
        described = state.compressed_pages(self.place(arrays), page=PAGE, name=type, type=type, replicated=True)
        return self.same(described, _flat(arrays), pages=True)

    def own_pages(self) -> Built:
        """Compressed rows in pages of their own."""
        arrays = {n: {"c16": _pool(POOL, 2, 10)} for n in LAYERS}
        described = state.compressed_pages(
            self.place(arrays), page=32, name="dsv4_c128", type="dsv4_c128", group=16, replicated=True
        )
        return self.same(described, _flat(arrays), pages=True)

    def pending(self) -> Built:
        """Groups that are not full yet."""
        arrays = {"a": _pool(2 * SLOTS, 40)}
        described = state.whole_items(self.place(arrays), type="c128_state", page=16, group=16, replicated=True)
        return self.same(described, list(arrays.values()), ring=16 * (self.ring // 16))

    def aux(self) -> Built:
        """Metadata rows."""
        rows = {"ids": _pool(SLOTS, 64), "room": _pool(SLOTS, 64)}
        return self.same(state.aux_rows(self.place(rows), replicated=True), list(rows.values()))


COMPONENTS: Mapping[str, tuple[str, Callable[[Maker], Built]]] = {
    "kv, NHD": ("kv", lambda m: m.paged(state.kv_pages, "nhd")),
    "kv, HND": ("kv", lambda m: m.paged(state.kv_pages, "hnd", "hnd")),
    "kv, MLA": ("kv", Maker.latent),
    "swa": ("swa", lambda m: m.paged(state.kv_pages, "swa", window=20)),
    "chunked_local": ("chunked_local", lambda m: m.paged(state.kv_pages, "chunked_local", attention_chunk=20)),
    "swa_ring": ("swa_ring", Maker.ring_of_heads),
    "dsa": ("dsa", lambda m: m.index("dsa")),
    "dsa_tail": ("dsa_tail", lambda m: m.rows("dsa_tail", group=4)),
    "dsv4": ("dsv4", lambda m: m.compressed("dsv4")),
    "dsv4_c128": ("dsv4_c128", Maker.own_pages),
    "dsv4_c4_state": ("dsv4_c4_state", lambda m: m.rows("dsv4_c4_state", group=4, keep=4)),
    "c128_state": ("c128_state", Maker.pending),
    "minimax_index_k": ("minimax_index_k", lambda m: m.index("minimax_index_k")),
    "minimax_dense_kv": (
        "minimax_dense_kv",
        lambda m: m.paged(state.kv_pages, "minimax_dense_kv", type="minimax_dense_kv"),
    ),
    "qsa_pending": ("qsa_pending", lambda m: m.items("qsa_pending")),
    "qsa_compressed": ("qsa_compressed", lambda m: m.compressed("qsa_compressed")),
    "block_scale": ("block_scale", lambda m: m.items("block_scale", POOL, page=PAGE)),
    "block_scale_swa": ("block_scale_swa", lambda m: m.items("block_scale_swa", POOL, page=PAGE, window=20)),
    "mamba": ("mamba", Maker.mamba),
    "request_row": ("request_row", lambda m: m.items("request_row")),
    "hidden": ("hidden", lambda m: m.items("hidden")),
    "encoder": ("encoder", lambda m: m.items("encoder")),
    "aux": ("aux", Maker.aux),
}
"""Name of a component in the documentation, to its state type and how it is made."""

LABELS: Mapping[str, str] = {label: type for label, (type, _) in COMPONENTS.items()}
"""Name of a component in the documentation, to its state type."""


def make(role: str, rank: int, width: int, labels: list[str], stock: Stock) -> dict[str, HeldState]:
    """Components of one rank, with space for one request in each."""
    prefill = role == "prefill"
    rng = np.random.default_rng([len(role), rank])
    maker = Maker(rank, width, 16 if prefill else 32, stock)
    made = {}
    for label in labels:
        # Nothing is known about a third party's type, so its pages move as a whole.
        built = COMPONENTS[label][1](maker) if label in COMPONENTS else maker.items(label, POOL, page=PAGE)
        needs: dict[str, Any] = {"slot": int(rng.integers(SLOTS)), **built.needs}
        if needs.pop("pages", False):
            needs["pages"] = rng.permutation(POOL)
        ids = statelink.indices_of(built.described.component, TOKENS, 0 if prefill else PREFIX, **needs)
        made[label] = HeldState(built.described, built.pools, built.cuts, ids)
    return made


def fill(held: Mapping[str, HeldState]) -> None:
    """Put the request into prefill's pools."""
    for label, each in held.items():
        for number, array in enumerate(each.pools):
            for distance, index in enumerate(each.ids[::-1]):
                array[index] = _content(label, each, number, distance)


def judge(held: Mapping[str, HeldState]) -> dict[str, str]:
    """What is wrong with each component on decode; empty for nothing."""
    verdicts = {}
    for label, each in held.items():
        wrong = touched = 0
        for number, array in enumerate(each.pools):
            for distance, index in enumerate(each.ids[::-1]):
                wrong += int((array[index] != _content(label, each, number, distance)).any())
            touched += int((np.delete(array, each.ids, axis=0) != POISON).any())
        verdicts[label] = f"{wrong} items are wrong, {touched} pools were touched elsewhere" if wrong or touched else ""
        if not len(each.ids):
            verdicts[label] = "there was nothing to move"
    return verdicts


def _content(label: str, each: HeldState, number: int, distance: int) -> Array:
    """The expected bytes of an item of a rank."""
    shape, cut = each.cuts[number]
    seed = [len(label), sum(label.encode()), number, distance]
    return cut(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def _whole(item: Array) -> Array:
    return item


def _pool(*shape: int) -> Array:
    """Memory that nobody has written to."""
    return np.full(shape, POISON, np.uint8)


def _flat(layers: Mapping[int, Any]) -> list[Array]:
    """All arrays of a mapping of layers."""
    found: list[Array] = []
    for arrays in layers.values():
        values = arrays.values() if isinstance(arrays, dict) else arrays if isinstance(arrays, tuple) else (arrays,)
        found.extend(values)
    return found
