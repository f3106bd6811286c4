"""Turns the lists of pools into components; used for all kinds of pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from statelink.state._build import Described, component
from statelink.state._shares import as_int, share

from ._lists import Named, band, by_id, by_layer, has, refuse
from ._views import PoolList, head_views, own_view, row_view, whole_views

if TYPE_CHECKING:
    from statelink.state._build import View

    from ._geometry import PoolGeometry
    from ._lists import Entry, Reader

__all__ = ["STATE", "Walk"]

STATE, SCALES = "get_state_buf_infos", "get_kv_scale_buf_infos"


class Walk:
    """Describes the pool of a model, or of its draft.

    Args:
        pool: The pool.
        geometry: Its numbers.
        reader: Reads its lists.
        draft: Number of the draft's first layer, for a draft.
        optional: Whether the other side may lack everything here.

    Attributes:
        found: The components, in order.
        types: Names of the state types that were considered.
        full_layers: Global layers of the component ``kv``, once it is described.
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
        self.full_layers: list[int] | None = None

    def pools(self) -> list[Any]:
        """The pool and the pools inside it."""
        inner = ("full_kv_pool", "swa_kv_pool", "mamba_pool", "index_k_pool")
        return [self.pool, *(getattr(self.pool, name) for name in inner if has(self.pool, name))]

    def add(
        self,
        type_: str,
        views: Iterable[View],
        *,
        partition: bool = False,
        tag: str = "",
        tp: tuple[int, int] | None = None,
        **more: Any,
    ) -> None:
        """Append a component if it has buffers on this stage. A component without ``tp`` is the same on every rank."""
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
                    tp=tp,
                    replicated=tp is None or self.geometry.replicated,
                    **more,
                )
            )

    def pool_list(self, pool: Any, method: str) -> PoolList:
        """One list of a pool."""
        return PoolList(pool, method, self.geometry, self.optional)

    def infos(self, pool: Any, method: str, type_: str) -> list[Entry]:
        """The buffers of one list."""
        entries = self.reader.infos(pool, method, self.geometry.envelope.get(type_, ()))
        if self.enveloped(type_) and len(entries) > 1:
            raise refuse(pool, method, f"it lists {len(entries)} buffers, where one envelope was announced")
        return entries

    def enveloped(self, type_: str) -> bool:
        """Whether items of a type are envelopes: each has all layers, and nobody says where a layer is in it."""
        return self.geometry.unified and type_ not in self.geometry.envelope

    def layers(self, pool: Any, method: str, kind: str, *, every: bool = False) -> list[int]:
        """Global layers of one kind on this stage; all layers if the pool has only one kind."""
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
        """A number that the geometry or the pool has. If both have it, they must agree."""
        own = getattr(pool, name, None)
        if own and given and own != given:
            raise refuse(pool, name, f"it is {own}; the geometry says {given} {what}")
        if not own and not given:
            raise refuse(pool, name, f"nobody says how many {what} there are", "give it with the geometry")
        return as_int(own or given, f"{type(pool).__name__}.{name}")

    def page(self, pool: Any) -> int:
        """Tokens of a page of the full pool."""
        return self.number(pool, "page_size", self.geometry.page_size, "tokens a page")

    def sliding_page(self) -> int:
        """Tokens of a page of the sliding pool."""
        inner = getattr(self.pool, "swa_kv_pool", None)
        # The pool's own number goes first: its kernels may have smaller pages than the items of its list.
        own = getattr(self.pool, "swa_page_size", None) or getattr(inner, "page_size", None)
        return as_int(own or self.page(self.pool), "the page size of the sliding pool")

    def window(self) -> int:
        """Tokens that sliding layers look back."""
        names = ("sliding_window", "unified_swa_window")
        name = next((name for name in names if getattr(self.pool, name, None)), names[0])
        return self.number(self.pool, name, self.geometry.window, "tokens a window")

    def envelope(self, pool: Any, method: str, entries: Sequence[Entry], tp: tuple[int, int]) -> list[View]:
        """The one view of a list of envelopes; see `enveloped`."""
        first, last = self.geometry.span
        name = Named(None, f"envelope.{first}-{last}", entries[0])
        return [own_view(self.pool_list(pool, method), name, tp)]

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
        listed = self.pool_list(pool, method)
        if self.enveloped(type_):
            # An envelope of latents is the same on every rank. An envelope of heads has only this rank's heads.
            tp = geometry.tp if heads else None
            views = self.envelope(pool, method, entries, tp or (0, 1))
            self.add(type_, views, page=page, window=window, partition=window is None, tp=tp)
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
            self.full_layers = list(dict.fromkeys(each.layer for each in named if each.layer is not None))
        views = list(self._pages(listed, named, page, heads if parts == default else 0, holder))
        tp = geometry.tp if heads else None
        self.add(type_, views, page=page, window=window, partition=window is None, tp=tp)

    def _pages(self, listed: PoolList, named: Sequence[Named], page: int, heads: int, holder: Any) -> Iterable[View]:
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
            yield from head_views(listed, named, page=page, heads=heads, order=layout)
            return
        for each in named:
            if each.part in geometry.fields:
                yield from whole_views(listed, each, rows=page)
            else:
                yield row_view(listed, each, rows=page, dtype=geometry.dtypes.get(each.part, geometry.dtype))

    def scales(self, type_: str, holder: Any, kind: str, page: int, window: int | None, *, every: bool) -> None:
        """Scales of block-quantised keys and values. They are this rank's own, in the order of its kernel."""
        entries = self.infos(holder, SCALES, type_)
        if not entries:
            return
        layers = (
            self.full_layers if self.full_layers and kind == "full" else self.layers(holder, SCALES, kind, every=every)
        )
        named = by_layer(holder, SCALES, entries, [("k_scale", layers), ("v_scale", layers)])
        listed = self.pool_list(holder, SCALES)
        tp = self.geometry.tp
        self.add(type_, [own_view(listed, each, tp) for each in named], page=page, window=window, tp=tp)

    def starts_at(self, *layers: int) -> None:
        """Check the first layer of the stage that the pool states."""
        start = getattr(self.pool, "start_layer", None)
        if self.draft is None and start is not None and start not in layers:
            said = " or ".join(str(layer) for layer in dict.fromkeys(layers))
            raise refuse(self.pool, "start_layer", f"it is {start}; by the geometry's stage it is {said}")

    def full_before(self) -> int:
        """Number of full-attention layers before this stage. Some pools state this number as their first layer."""
        geometry = self.geometry
        return sum(kind == "full" for kind in geometry.kinds[: geometry.span[0]])
