"""A constructor for raw pages with the recurrent states of a layer packed one after the other.

Every array may be a torch tensor, a numpy array or a `Memory`. Nothing is copied. The arrays must outlive every link
that was opened with the description.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from statelink._arguments import shown
from statelink.errors import StateError

from ._build import Described, View, component
from ._memory import Memory
from ._requests import Groups, conv_view, ssm_view
from ._shares import as_int, expect_axes, pair, share
from ._signature import checked, settle

__all__ = ["PackedState", "packed_slots"]

Array = Any

KINDS = ("conv", "ssm", "opaque")


class PackedState(msgspec.Struct, frozen=True):
    """One state in a raw page. The next one begins where it ends.

    Attributes:
        kind: ``conv`` for a convolution state, ``ssm`` for a recurrent state by head, ``opaque`` for a state of which
            only the size is known.
        shape: This rank's part of it: ``[channels, kernel]`` or, transposed, ``[kernel, channels]``; ``[heads, ...]``;
            any for ``opaque``.
        dtype: Element type by its usual name, compared verbatim.
        itemsize: Bytes of one element.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    def __post_init__(self) -> None:
        settle(self, "a packed state")
        if self.kind not in KINDS:
            raise StateError(f"no packed state is of kind {shown(self.kind)}", hint=f"one of {', '.join(KINDS)}")
        sizes = [as_int(n, "an extent of a packed state") for n in (*self.shape, self.itemsize)]
        if not self.shape or min(sizes) < 1:
            raise StateError(
                "a packed state has an extent above zero on each axis",
                cause=f"shape {self.shape}, elements of {self.itemsize} bytes",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self.itemsize * math.prod(self.shape)


@checked
def packed_slots(
    layers: Mapping[int, Array],
    *,
    states: Sequence[PackedState],
    conv_groups: Groups | None = None,
    heads: int = 0,
    tp: tuple[int, int] = (0, 1),
    transposed: bool = False,
    name: str = "mamba",
    replicated: bool = False,
    format: str = "",
) -> Described:
    """Raw pages of recurrent layers: one page a request, with its states one after the other, and then padding.

    The buffers are named as those of `mamba_slots`, so the two pair. An opaque state moves as a whole, from a rank to
    the rank of the same number. Another TP width on the other side is a mismatch when the sides connect.

    Args:
        layers: Global layer number to its array of bytes ``[slots, bytes of a page]``. Slots may have a larger stride.
        states: The states of a page, in order. What follows the last one is padding, and does not move.
        conv_groups: As for `mamba_slots`: the blocks of a convolution's channels that are each dealt out on their own.
            The default is one block of the whole width. Where the blocks are not known, the state is ``opaque``.
        heads: Heads of the recurrent states in the whole model; needed when there is one.
        tp: This rank and the width over which the states are sharded.
        transposed: Whether convolution states have their channels last.
        name: Component name.
        replicated: Whether other ranks hold the same share, too: context-parallel ones, or all where ``tp`` is (0, 1).
        format: Tag for properties that strides do not express. It is compared verbatim.

    Raises:
        StateError: The states do not fit into a page, or are not this rank's share of the whole model's.
    """
    views: list[View] = []
    for layer, array in layers.items():
        memory = Memory.of(array)
        expect_axes(f"layers.{layer}", memory, "slots, bytes")
        for label, state, part in _parts(layer, memory, states):
            if state.kind == "conv":
                views.append(conv_view(label, layer, part, conv_groups, tp, transposed))
            elif state.kind == "ssm":
                views.append(ssm_view(label, layer, part, heads, tp))
            else:
                views.append(_whole_of_rank(label, layer, part, tp))
    return component(name, "mamba", views, format=format, tp=tp, replicated=replicated)


def _parts(layer: int, raw: Memory, states: Sequence[PackedState]) -> Iterator[tuple[str, PackedState, Memory]]:
    """The name of each state's buffer, and the state as an array of its own ``[slots, ...]`` in the raw pages."""
    slots, size = raw.shape
    needed = sum(state.nbytes for state in states)
    dense = size < 2 or raw.strides[1] == 1
    if raw.itemsize != 1 or not dense or not states or needed > size:
        raise StateError(
            f"the raw pages of layer {layer} cannot hold the states that are packed in them",
            cause=f"pages of {size} elements of {raw.itemsize} bytes, {raw.strides[1]} bytes apart; "
            f"{len(states)} states of {needed} bytes",
            hint="pass pages as bytes, and each state with this rank's part of its shape",
        )
    at = 0
    for state, label in zip(states, _labels(states), strict=True):
        inner = tuple(state.itemsize * math.prod(state.shape[axis + 1 :]) for axis in range(len(state.shape)))
        part = Memory(
            address=raw.address + at if slots else raw.address,
            shape=(slots, *state.shape),
            strides=(raw.strides[0], *inner),
            dtype=state.dtype,
            itemsize=state.itemsize,
            region=raw.region,
        )
        yield f"layers.{layer}.{label}", state, part
        at += state.nbytes


def _labels(states: Sequence[PackedState]) -> Iterator[str]:
    """The names that `mamba_slots` gives: several convolution states are numbered. Opaque ones always are."""
    kinds = [state.kind for state in states]
    for number, kind in enumerate(kinds):
        numbered = kind == "opaque" or (kind == "conv" and kinds.count(kind) > 1)
        yield f"{kind}.{kinds[:number].count(kind)}" if numbered else kind


def _whole_of_rank(label: str, layer: int, part: Memory, tp: tuple[int, int]) -> View:
    """A state that is cut for TP in an unknown way. It has an axis ``rank``, and this rank holds its own number."""
    rank, width = pair(tp, f"the rank and width of {label!r}")
    share(label, "rank", width, tp)
    count = math.prod(part.shape[1:])
    flat = msgspec.structs.replace(
        part, shape=(part.shape[0], 1, count), strides=(part.strides[0], count * part.itemsize, part.itemsize)
    )
    box = ((rank, 0), (rank + 1, count))
    return View(label, flat, (width, count), ("rank", "element"), [box], (0, 1), layer=layer)
