"""The kinds of pools that engines have: how each is recognised, and what its lists are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._build import Described, component
from ._engine_pools_compressed import compressed
from ._engine_pools_lists import PAGES, Named, band, by_id, by_layer, has, refuse
from ._engine_pools_states import mamba, qsa
from ._engine_pools_views import Source, head_views, own_view, row_view, whole_views
from ._shares import share, whole

if TYPE_CHECKING:
    from ._build import View
    from ._engine_pools_geometry import PoolGeometry
    from ._engine_pools_lists import Entry, Reader

__all__ = ["Walk", "family"]

STATE, SCALES = "get_state_buf_infos", "get_kv_scale_buf_infos"
CONTIGUOUS, SPARSE = PAGES


def family(pool: Any) -> str:
    """What kind of pool it is: the first test that fits, since later ones fit earlier kinds too."""
    if any(has(pool, name) for name in ("index_kv_pool", "index_k_pool", SPARSE)):
        return "minimax"
    if has(pool, "compression_ratios") or (has(pool, "swa_kv_pool") and has(pool, "translate_loc_from_full_to_swa")):
        return "swa"
    if has(pool, "full_kv_pool") and has(pool, "mamba_pool"):
        return "hybrid"
    if has(pool, STATE) and any(
        has(pool, name) for name in ("kpool_use_compress", "index_kpool", "get_compress_tail_buf_infos")
    ):
        return "dsa"
    # A pool that lists state without being of a known kind is refused in the end: nobody reads that list.
    return "plain"


class Walk:
    """One walk over the pool of a model, or of its draft.

    Args:
        pool: The pool.
        geometry: Its numbers.
        reader: Reads its lists.
        draft: Number of the draft's first layer, for a draft.
        optional: Whether the other side may lack everything here.
    """

    def __init__(
        self, pool: Any, geometry: PoolGeometry, reader: Reader, *, draft: int | None = None, optional: bool = False
    ) -> None:
        self.pool = pool
        self.geometry = geometry
        self.reader = reader
        self.draft = draft
        self.optional = optional and draft is not None
        self.found: list[Described] = []
        self.types: set[str] = set()
        self._full: list[int] | None = None

    def walk(self) -> None:
        """Describe everything that the pool has."""
        if not any(has(self.pool, name) for name in PAGES):
            raise refuse(self.pool, CONTIGUOUS, "it does not have it: this is no pool of pages")
        {
            "minimax": self._minimax,
            "swa": self._sliding,
            "hybrid": self._hybrid,
            "dsa": self._dsa,
            "plain": self._plain,
        }[family(self.pool)]()

    def pools(self) -> list[Any]:
        """The pool and the pools inside it."""
        inner = ("full_kv_pool", "swa_kv_pool", "mamba_pool", "index_k_pool")
        return [self.pool, *(getattr(self.pool, name) for name in inner if has(self.pool, name))]

    def add(self, type_: str, views: Iterable[View], *, partition: bool = False, tag: str = "", **more: Any) -> None:
        """Append a component, if it has buffers on this stage."""
        self.types.add(type_)
        buffers = list(views)
        if buffers:
            self.found.append(
                component(
                    type_ if self.draft is None else f"draft.{type_}",
                    type_,
                    buffers,
                    partition=self.geometry.partition if partition else None,
                    format="; ".join(part for part in (self.geometry.format, tag) if part),
                    **more,
                )
            )

    def source(self, pool: Any, method: str) -> Source:
        """Where views of one list come from."""
        return Source(pool, method, self.geometry, self.optional)

    def infos(self, pool: Any, method: str, type_: str) -> list[Entry]:
        """The buffers of one list."""
        entries = self.reader.infos(pool, method, self.geometry.envelope.get(type_, ()))
        if self.enveloped(type_) and len(entries) > 1:
            raise refuse(pool, method, f"it lists {len(entries)} buffers, where one envelope was announced")
        return entries

    def enveloped(self, type_: str) -> bool:
        """Whether items of a type are envelopes that nobody can look into."""
        return self.geometry.unified and type_ not in self.geometry.envelope

    def layers(self, pool: Any, method: str, kind: str, *, every: bool = False) -> list[int]:
        """Global layers of one kind on this stage; all of them where the pool has only one kind."""
        geometry = self.geometry
        if geometry.kinds:
            return [layer for layer in range(*geometry.span) if geometry.kinds[layer] == kind]
        if not every and self.draft is None:
            raise refuse(
                pool,
                method,
                f"it holds only the {kind} layers, and does not say which layers of the model these are",
                "give PoolGeometry.kinds",
            )
        return list(range(*geometry.span))

    def number(self, pool: Any, name: str, given: int, what: str) -> int:
        """A number that the geometry or the pool knows; both agree where both do."""
        own = getattr(pool, name, None)
        if own and given and own != given:
            raise refuse(pool, name, f"it is {own}; the geometry says {given} {what}")
        if not own and not given:
            raise refuse(pool, name, f"nobody says how many {what} there are", "give it with the geometry")
        return whole(own or given, f"{type(pool).__name__}.{name}")

    def page(self, pool: Any) -> int:
        """Tokens of a page of the full pool."""
        return self.number(pool, "page_size", self.geometry.page_size, "tokens a page")

    def sliding_page(self) -> int:
        """Tokens of a page of the sliding pool."""
        inner = getattr(self.pool, "swa_kv_pool", None)
        return whole(getattr(inner, "page_size", None) or self.page(self.pool), "the page size of the sliding pool")

    def window(self) -> int:
        """Tokens that sliding layers look back."""
        names = ("sliding_window", "unified_swa_window")
        name = next((name for name in names if getattr(self.pool, name, None)), names[0])
        return self.number(self.pool, name, self.geometry.window, "tokens a window")

    def envelope(self, pool: Any, method: str, entries: Sequence[Entry], tp: tuple[int, int]) -> list[View]:
        """The one view of an envelope that nobody can look into."""
        first, last = self.geometry.span
        name = Named(None, f"envelope.{first}-{last}", entries[0])
        return [own_view(self.source(pool, method), name, tp)]

    def attention(
        self,
        type_: str,
        method: str,
        kind: str,
        holder: Any,
        *,
        heads: int,
        page: int,
        ids: bool = False,
        every: bool = False,
        window: int | None = None,
    ) -> None:
        """Pages of keys and values, or of latents."""
        pool, geometry = self.pool, self.geometry
        entries = self.infos(pool, method, type_)
        if not entries:
            self.types.add(type_)
            return
        source = self.source(pool, method)
        if self.enveloped(type_):
            # Latents are the same on every rank; an envelope of heads is this rank's own.
            views = self.envelope(pool, method, entries, geometry.tp if heads else (0, 1))
            self.add(type_, views, page=page, window=window, partition=window is None)
            return
        default = ("k", "v") if heads else ("latent",)
        parts = tuple(name for name, _ in geometry.groups.get(type_, ())) or default
        known = self.reader.values(pool, "get_kv_layer_ids", entries, method) if ids else []
        if known:
            known = known if self.draft is None else band(known, self.draft)
            named = by_id(pool, "get_kv_layer_ids", entries, known, parts, geometry.span)
        else:
            layers = self.layers(pool, method, kind, every=every)
            hint = "for an envelope of all layers, set PoolGeometry.unified" if len(entries) == 1 else ""
            named = by_layer(pool, method, entries, [(part, layers) for part in parts], hint)
        if type_ == "kv":
            self._full = list(dict.fromkeys(each.layer for each in named if each.layer is not None))
        views = list(self._pages(source, named, page, heads if parts == default else 0, holder))
        self.add(type_, views, page=page, window=window, partition=window is None)

    def _pages(self, source: Source, named: Sequence[Named], page: int, heads: int, holder: Any) -> Iterable[View]:
        geometry = self.geometry
        if heads:
            layout = getattr(holder, "kv_cache_layout", None) or geometry.order
            if layout not in ("nhd", "hnd"):
                raise refuse(holder, "kv_cache_layout", f"pages in the layout {layout!r} have heads that strides miss")
            first, last = share("kv", "head", heads, geometry.tp)
            local = getattr(holder, "head_num", None)
            if local is not None and local != last - first:
                raise refuse(
                    holder,
                    "head_num",
                    f"it is {local}; rank {geometry.tp[0]} of {geometry.tp[1]} holds "
                    f"{last - first} of the {heads} heads of the geometry",
                )
            yield from head_views(source, named, page=page, heads=heads, order=layout)
            return
        for each in named:
            if each.part in geometry.fields:
                yield from whole_views(source, each, rows=page)
            else:
                yield row_view(source, each, rows=page, dtype=geometry.dtypes.get(each.part, geometry.dtype))

    def scales(self, type_: str, holder: Any, kind: str, page: int, window: int | None, *, every: bool) -> None:
        """Scales of block-quantised keys and values: this rank's own, in whatever order its kernel wants."""
        entries = self.infos(holder, SCALES, type_)
        if not entries:
            return
        layers = self._full if self._full and kind == "full" else self.layers(holder, SCALES, kind, every=every)
        named = by_layer(holder, SCALES, entries, [("k_scale", layers), ("v_scale", layers)])
        source = self.source(holder, SCALES)
        self.add(type_, [own_view(source, each, self.geometry.tp) for each in named], page=page, window=window)

    def _starts_at(self, *layers: int) -> None:
        """Check the pool's own idea of where its stage begins."""
        start = getattr(self.pool, "start_layer", None)
        if self.draft is None and start is not None and start not in layers:
            said = " or ".join(str(layer) for layer in dict.fromkeys(layers))
            raise refuse(self.pool, "start_layer", f"it is {start}; by the geometry's stage it is {said}")

    def _full_before(self) -> int:
        """Full-attention layers before this stage: what some pools count their start in."""
        geometry = self.geometry
        return sum(kind == "full" for kind in geometry.kinds[: geometry.span[0]])

    def _plain(self) -> None:
        pool, page = self.pool, self.page(self.pool)
        self._starts_at(self.geometry.span[0])
        self.attention("kv", CONTIGUOUS, "full", pool, heads=self.geometry.kv_heads, page=page, every=True)
        if self.draft is not None:
            qsa(self, page)
        elif self.geometry.kv_heads:
            self.scales("block_scale", pool, "full", page, None, every=True)

    def _minimax(self) -> None:
        pool, page = self.pool, self.page(self.pool)
        if has(pool, "index_kv_pool"):
            raise refuse(pool, "index_kv_pool", "an index with values beside its keys is not known")
        self._starts_at(self.geometry.span[0])
        heads = self.geometry.kv_heads
        self.attention("kv", SPARSE, "sparse", pool, heads=heads, page=page, ids=True)
        if has(pool, "index_k_pool"):
            method = "get_index_k_state_buf_infos"
            holder = pool if has(pool, method) else pool.index_k_pool
            if not has(holder, method):
                raise refuse(holder, method, "it has no list of index keys, though the pool around it has them")
            self._index("minimax_index_k", holder, method, self._full, page, page)
        self.attention("minimax_dense_kv", "get_dense_kv_state_buf_infos", "dense", pool, heads=heads, page=page)

    def _sliding(self) -> None:
        pool, geometry = self.pool, self.geometry
        if has(pool, "compression_ratios"):
            compressed(self)
            return
        self._starts_at(geometry.span[0], self._full_before())
        page, window, inner = self.page(pool), self.window(), self.sliding_page()
        full = getattr(pool, "full_kv_pool", None)
        self.attention("kv", CONTIGUOUS, "full", full, heads=geometry.kv_heads, page=page, ids=True)
        heads = geometry.window_heads
        self.attention("swa", STATE, "window", pool.swa_kv_pool, heads=heads, page=inner, window=window)
        if full is not None:
            self.scales("block_scale", full, "full", page, None, every=False)
        self.scales("block_scale_swa", pool.swa_kv_pool, "window", inner, window, every=False)

    def _hybrid(self) -> None:
        pool, geometry = self.pool, self.geometry
        page, full = self.page(pool), pool.full_kv_pool
        if geometry.kinds:
            self._starts_at(self._full_before())
        self.attention("kv", CONTIGUOUS, "full", full, heads=geometry.kv_heads, page=page, ids=True)
        if self.draft is None:
            mamba(self, pool, ids=True)
        if getattr(pool, "use_dsa", False) or family(full) == "dsa":
            if not has(full, STATE):
                raise refuse(full, STATE, "it has no list of index keys, though the pool around it uses them")
            self._index_and_tail(full, page)
        qsa(self, page)

    def _dsa(self) -> None:
        self._plain()
        self._index_and_tail(self.pool, self.page(self.pool))

    def _index_and_tail(self, pool: Any, page: int) -> None:
        group = int(getattr(pool, "index_kpool", 0) or 1)
        pooled = bool(getattr(pool, "kpool_use_compress", False))
        if any(name == "index_k" for name, _ in self.geometry.groups.get("kv", ())):
            # The list of pages has the index keys already; they may be listed here once more.
            if not self.reader.holds(self.reader.infos(pool, STATE, keep=False)):
                raise refuse(pool, STATE, "it lists index keys that the list of pages does not have")
        else:
            self._index("dsa", pool, STATE, self._full, page, page // group if pooled else page)
        tail = "get_compress_tail_buf_infos"
        if not pooled:
            return
        entries = self.infos(pool, tail, "dsa_tail")
        ring = group + int(getattr(pool, "tail_extra_slots", 0) or 0)
        for number, entry in enumerate(entries):
            if entry.nbytes % ring:
                raise refuse(pool, tail, f"item of entry {number}: {entry.nbytes} bytes are no {ring} slots of a ring")
        # An item is a request's ring; the plan addresses its slots.
        rows = [
            each._replace(stride=each.stride // ring, nbytes=each.nbytes // ring, items=each.items * ring)
            for each in entries
        ]
        layers = self._full or []
        named = by_layer(pool, tail, rows, [("key", layers), ("score", layers)]) if rows else []
        views = [view for each in named for view in whole_views(self.source(pool, tail), each)]
        self.add("dsa_tail", views, page=1, group=group)

    def _index(self, type_: str, pool: Any, method: str, layers: list[int] | None, page: int, rows: int) -> None:
        """Index keys: one buffer a layer, without items where a layer shares another's."""
        entries = self.infos(pool, method, type_)
        named = by_layer(pool, method, entries, [("index_k", layers or [])]) if entries else []
        source, axis = self.source(pool, method), "token" if rows == page else "row"
        views = [view for each in named for view in whole_views(source, each, rows=rows, axis=axis)]
        self.add(type_, views, page=page, partition=True)
