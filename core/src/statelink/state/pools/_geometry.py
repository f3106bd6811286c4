"""The numbers that an engine's pools lack: the model's size, and the share of it that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from statelink._arguments import shown
from statelink.errors import StateError
from statelink.state._inventory import Partition
from statelink.state._memory import size_of
from statelink.state._shares import pair
from statelink.state._signature import settle
from statelink.state._types import state_type

__all__ = ["PageField", "PoolGeometry", "StateTensor", "itemsize_of"]

KINDS = ("full", "window", "linear", "sparse", "dense")


class PageField(msgspec.Struct, frozen=True):
    """One field of a planar page. All its rows come before those of the next field.

    Attributes:
        name: Name, such as ``k`` or ``scale``.
        width: Bytes of one row.
        dtype: Element type; bytes by default.
    """

    name: str
    width: int
    dtype: str = "uint8"

    def __post_init__(self) -> None:
        settle(self, "a page's field")


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor in which linear layers keep a request's state.

    Attributes:
        name: Name, such as ``conv`` or ``ssm``.
        dtype: Element type.
        heads: Heads of the sliced axis in the whole model. Needed if there may be more ranks than heads, so that
            several ranks hold one head. 0: every rank holds an equal part of the axis.
        layers: The global layers that have it; by default every linear layer.
        blocks: Blocks of the sliced axis that are each dealt out on their own, in order, if the pool does not name
            them: the elements of each in the whole model, and the heads or groups in which it is dealt out. Several
            ranks hold the same head if there are more ranks than heads, so ``(16, 1)`` is a block that every rank holds
            whole. Both sides must give the same.
    """

    name: str
    dtype: str
    heads: int = 0
    layers: tuple[int, ...] | None = None
    blocks: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        settle(self, "a state's tensor")


class PoolGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The model's numbers, and this rank's shares.

    Pools have addresses and sizes of local memory. Pairing with another layout needs the whole model's numbers. They
    are the same on every rank of both sides, except ``tp``, ``state_tp``, ``stage`` and ``partition``.

    Attributes:
        layers: Layers of the model, without draft layers.
        dtype: Element type of keys, values and latents.
        kv_heads: KV heads of the model before any replication; 0 if pages hold latents (MLA).
        window_kv_heads: The same for sliding-window layers; by default ``kv_heads``.
        tp: This rank and the width of attention TP.
        state_tp: The same for recurrent states; by default ``tp``.
        stage: First global layer of this pipeline stage, and one past its last; by default the whole model.
        kinds: For models of several kinds of layers, the kind of each: ``full``, ``window``, ``linear``, ``sparse``
            or ``dense``. Needed if pools publish no layer ids.
        page_size: Tokens of a page; by default the pool's own number.
        window: Tokens that sliding-window layers look back; by default the pool's own number.
        order: ``nhd`` or ``hnd``, if the pool does not say.
        kind: Memory kind of the pools, such as ``cuda:0``.
        dtypes: Tensor name to element type, for tensors other than keys, values and latents; by default bytes.
        fields: Tensor name to the fields of its planar pages (all keys, then all scales), or to one field if rows are
            dense. The rows of other tensors are unknown, so their pages move as a whole, between equal page sizes only.
        state_tensors: Tensors of linear layers, in the order of the pool's list.
        conv_heads: Heads of each independently sharded block of the convolution, if there may be fewer key heads than
            ranks. By default, blocks are divided channel by channel. A pool names its blocks by
            ``get_state_conv_shard_groups``. If the model has several blocks (x, B and C of Mamba 2) that the pool does
            not name, give them in ``blocks`` of `StateTensor`. Without them, all channels are one block, and ranks of
            unequal widths would get wrong channels. If they are unknown, name the width in ``format``, so that such
            ranks are refused.
        groups: Component type to its list of ``(tensor, ratio)``, in the order of the pool's list, if that differs from
            the documented one. ``ratio`` is the compression ratio of the layers that have the tensor, or ``None`` for
            all layers. Needed for the two-pool lists of compressed attention, and for ratios 1 and 2.
        unified: Whether every list is one envelope that holds all layers of an item.
        envelope: For ``unified``: component type to ``(offset, bytes)`` of each buffer in one envelope, in the order
            that the list would have without envelopes. Other types move as whole envelopes, between ranks of the same
            TP rank and width.
        request_ratio: Positions of one group of the request-scoped compressor (128 or 2).
        c128_rows: Compressed rows in one page of a separately addressed C128 pool.
        partition: Which positions of the pages this rank holds.
        replicated: Whether other ranks hold the same share of heads and of recurrent states, as context-parallel ranks
            do. State without heads is always the same on every rank.
        format: Tag of every component, compared verbatim.
    """

    layers: int
    dtype: str
    kv_heads: int = 0
    window_kv_heads: int | None = None
    tp: tuple[int, int] = (0, 1)
    state_tp: tuple[int, int] | None = None
    stage: tuple[int, int] | None = None
    kinds: Sequence[str] = ()
    page_size: int = 0
    window: int = 0
    order: str = "nhd"
    kind: str = "dram"
    dtypes: Mapping[str, str] = {}
    fields: Mapping[str, Sequence[PageField]] = {}
    state_tensors: Sequence[StateTensor] = (StateTensor("conv", "bfloat16"), StateTensor("ssm", "float32"))
    conv_heads: Sequence[int] = ()
    groups: Mapping[str, Sequence[tuple[str, int | None]]] = {}
    unified: bool = False
    envelope: Mapping[str, Sequence[tuple[int, int]]] = {}
    request_ratio: int = 128
    c128_rows: int = 0
    partition: Partition | None = None
    replicated: bool = False
    format: str = ""

    def __post_init__(self) -> None:
        settle(self, "the geometry", without=("dtype",))  # `itemsize_of` says what to pass
        first, last = pair(self.span, "the geometry's stage")
        if self.layers < 1 or not 0 <= first < last <= self.layers:
            raise StateError("a pipeline stage is a range of the model's layers", cause=f"{self.span} of {self.layers}")
        if self.kinds and (len(self.kinds) != self.layers or not set(self.kinds) <= set(KINDS)):
            raise StateError(
                "the geometry's kinds name the kind of every layer",
                cause=f"{len(self.kinds)} kinds for {self.layers} layers: {', '.join(sorted(set(self.kinds)))}",
                hint=f"known kinds: {', '.join(KINDS)}",
            )
        for what, place in (("tp", self.tp), ("state_tp", self.states)):
            rank, width = pair(place, f"the geometry's {what}")
            if not 0 <= rank < width:
                raise StateError(f"the geometry's {what} is a rank and a width", cause=f"rank {rank} of {width}")
        if self.order not in ("nhd", "hnd"):
            raise StateError(f"no page order {self.order!r}", hint="'nhd' or 'hnd'")
        if min(self.kv_heads, self.window_heads, self.page_size, self.window, self.c128_rows) < 0:
            raise StateError("the geometry has a negative size")
        if self.request_ratio < 1:
            raise StateError("a compressor's group has at least one position", cause=f"ratio {self.request_ratio}")
        for name in (*self.groups, *self.envelope):
            if state_type(name).name != name:
                raise StateError(
                    f"the geometry describes lists of {name!r}", hint=f"the type's name is {state_type(name).name!r}"
                )
        if self.envelope and not self.unified:
            raise StateError("the geometry describes envelopes, but says that nothing is unified")

    @property
    def span(self) -> tuple[int, int]:
        """This stage's layers."""
        return self.stage or (0, self.layers)

    @property
    def states(self) -> tuple[int, int]:
        """This rank and the width over which recurrent states are sharded."""
        return self.state_tp or self.tp

    @property
    def window_heads(self) -> int:
        """KV heads of sliding-window layers in the whole model."""
        return self.kv_heads if self.window_kv_heads is None else self.window_kv_heads


def itemsize_of(dtype: str) -> int:
    """Bytes of one element of a type, given by its usual name.

    Raises:
        StateError: No such type is known, or its elements are smaller than a byte.
    """
    size = size_of(dtype)
    if size is None:
        raise StateError(
            f"no element type {shown(dtype)} is known",
            hint="give its name, such as 'bfloat16'; packed types are described as 'uint8', with a format tag",
        )
    return size
