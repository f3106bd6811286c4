"""Turns the lists of pools into components; used for all kinds of pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from statelink.state import Axis, Buffer, Component, Described, Layout, Region

from ._layouts import EMPTY, head_layout, own_layout, row_layout, share, whole_layout
from ._lists import has, refuse

if TYPE_CHECKING:
    from ._geometry import Geometry
    from ._lists import Listing, Named, Reader

__all__ = ["SCALES", "STATE", "Walk"]

STATE, SCALES = "get_state_buf_infos", "get_kv_scale_buf_infos"


class Walk:
    """Describes the pool of a model, or of its draft.

    Args:
        pool: The pool.
        geometry: Its numbers.
        reader: Reads its lists.
        draft: Number of the draft's first layer, for a draft. The other side may lack everything of it.

    Attributes:
        found: The components, in order.
        full_layers: Global layers of the component ``kv``, once it is described.
    """

    def __init__(self, pool: Any, geometry: Geometry, reader: Reader, *, draft: int | None = None) -> None:
        self.pool = pool
        self.geometry = geometry
        self.reader = reader
        self.draft = draft
        self.found: list[Described] = []
        self.full_layers: list[int] = []

    def pools(self) -> list[Any]:
        """The pool and the pools inside it."""
        inner = ("full_kv_pool", "swa_kv_pool", "mamba_pool")
        return [self.pool, *(getattr(self.pool, name) for name in inner if has(self.pool, name))]

    def add(
        self,
        type_: str,
        named: Iterable[Named],
        layout: Callable[[Named], Layout],
        *,
        tag: str = "",
        tp: tuple[int, int] | None = None,
        **more: Any,
    ) -> None:
        """Append a component if it has buffers on this stage. A component without ``tp`` is the same on every rank."""
        regions: dict[Region, int] = {}
        layouts: dict[Layout, Layout] = {}
        buffers = []
        for each in named:
            entry = each.entry
            made = layout(each) if entry.items else EMPTY
            buffers.append(
                Buffer(
                    name=each.label,
                    region=regions.setdefault(entry.region, len(regions)) if entry.region else 0,
                    offset=0,
                    stride=entry.nbytes,
                    count=entry.items,
                    # Buffers of one geometry share one object, so that plans can compare them by identity.
                    layout=layouts.setdefault(made, made),
                    layer=each.layer,
                    optional=self.draft is not None,
                )
            )
        if buffers:
            component = Component(
                name=type_ if self.draft is None else f"draft.{type_}",
                type=type_,
                buffers=tuple(buffers),
                format="; ".join(part for part in (self.geometry.format, tag) if part),
                share=None if tp is None else Axis(*tp),
                replicated=tp is None,
                **more,
            )
            self.found.append(Described(component, tuple(regions)))

    def whole(self, type_: str, listing: Listing, named: Iterable[Named], *, tag: str = "", **more: Any) -> None:
        """Append a component whose items move as a whole, and are the same on every rank."""
        self.add(type_, named, partial(whole_layout, listing), tag=tag, **more)

    def page(self, pool: Any) -> int:
        """Tokens of a page of the full pool."""
        if pool.page_size != self.geometry.page:
            raise refuse(
                pool, "page_size", f"it is {pool.page_size}; the model's is {self.geometry.page} tokens a page"
            )
        return self.geometry.page

    def sliding_page(self) -> int:
        """Tokens of a page of the sliding pool."""
        inner = getattr(self.pool, "swa_kv_pool", None)
        # The pool's own number goes first: its kernels may have smaller pages than the items of its list.
        own = getattr(self.pool, "swa_page_size", None) or getattr(inner, "page_size", None)
        return int(own or self.page(self.pool))

    def window(self) -> int:
        """Tokens that sliding layers look back."""
        own, given = getattr(self.pool, "sliding_window", None), self.geometry.window
        if own and given and own != given:
            raise refuse(self.pool, "sliding_window", f"it is {own}; the scheduler says {given} tokens a window")
        if not own and not given:
            raise refuse(self.pool, "sliding_window", "nobody says how many tokens a window has")
        return int(own or given)

    def attention(
        self,
        type_: str,
        method: str,
        layers: Sequence[int],
        holder: Any,
        *,
        heads: int,
        page: int,
        ids: bool = False,
        window: int | None = None,
    ) -> None:
        """Pages of keys and values, or of latents.

        Args:
            type_: The state type.
            method: The method that lists them.
            layers: Global layers that have them, if the pool does not say so itself.
            holder: The pool whose attributes say how pages lie in memory.
            heads: KV heads of the whole model; 0 for latents.
            page: Tokens of a page.
            ids: Whether the pool may publish layer ids.
            window: Tokens that the layers look back, if they have a window.
        """
        geometry = self.geometry
        listing = self.reader.infos(self.pool, method)
        if not listing.entries:
            return
        parts = ("k", "v") if heads else ("latent",)
        known = self.reader.values(listing, "get_kv_layer_ids") if ids else []
        if known:
            named = listing.by_id("get_kv_layer_ids", known, parts, geometry.stage, {})
        else:
            named = listing.by_layer([(part, layers) for part in parts])
        if type_ == "kv":
            self.full_layers = list(dict.fromkeys(each.layer for each in named if each.layer is not None))
        if not heads:
            layout = partial(row_layout, listing, page=page, element=geometry.element)
            self.add(type_, named, layout, page=page, window=window)
            return
        order = getattr(holder, "kv_cache_layout", None) or "nhd"
        if order not in ("nhd", "hnd"):
            raise refuse(holder, "kv_cache_layout", f"pages in the layout {order!r} have heads that strides miss")
        first, last = share(type_, "head", heads, geometry.tp)
        local = getattr(holder, "head_num", None)
        if local is not None and local != last - first:
            raise refuse(
                holder,
                "head_num",
                f"it is {local}; rank {geometry.tp[0]} of {geometry.tp[1]} holds {last - first} of the {heads} heads "
                "of the model",
            )
        pages = partial(
            head_layout, listing, page=page, heads=heads, tp=geometry.tp, order=order, element=geometry.element
        )
        self.add(type_, named, pages, page=page, window=window, tp=geometry.tp)

    def scales(self, type_: str, pool: Any, layers: Sequence[int], *, page: int, window: int | None = None) -> None:
        """Scales of block-quantised keys and values. They are this rank's own, in the order of its kernel.

        Args:
            type_: The state type.
            pool: The pool that lists them, which is the walk's, or within it. One without such values lists none.
            layers: Global layers that have them.
            page: Tokens of a page.
            window: Tokens that the layers look back, if they have a window.
        """
        listing = self.reader.infos(pool, SCALES)
        if listing.entries:
            named = listing.by_layer([(part, layers) for part in ("k_scale", "v_scale")])
            tp = self.geometry.tp
            self.add(type_, named, partial(own_layout, tp=tp), page=page, window=window, tp=tp)

    def starts_at(self, *layers: int) -> None:
        """Check the first layer of the stage that the pool states."""
        start = getattr(self.pool, "start_layer", None)
        if self.draft is None and start is not None and start not in layers:
            said = " or ".join(str(layer) for layer in dict.fromkeys(layers))
            raise refuse(self.pool, "start_layer", f"it is {start}; by this pipeline stage it is {said}")
