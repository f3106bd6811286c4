"""Finds out from vLLM's `MambaSpec` what a raw page of recurrent state holds, and how tensor parallelism cuts it.

vLLM packs the states of a layer one after the other. The specification has the shapes of this rank. It does not have
the blocks of channels that are each dealt out on their own. They follow from the kind of layer and from the shapes. If
they do not, the states are opaque: they move between ranks of equal width, and another width is refused when servers
connect.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from statelink.state import PackedState

__all__ = ["Packing", "packing_of"]

Groups = list[int | tuple[int, int]]


class Packing(NamedTuple):
    """How `statelink.state.packed_slots` describes a page.

    Attributes:
        states: The states of a page, in order.
        conv_groups: Blocks of the convolution's channels, of the whole model.
        heads: Heads of the recurrent state, of the whole model.
    """

    states: tuple[PackedState, ...]
    conv_groups: Groups | None = None
    heads: int = 0


def packing_of(spec: Any, width: int, groups: int | None, channels_first: bool) -> Packing:
    """Describe the pages of a layer.

    Args:
        spec: vLLM's `MambaSpec`.
        width: Ranks over which the state is sharded; 1 if each holds all of it.
        groups: The model's number of groups of Mamba2, if it is known.
        channels_first: Whether vLLM keeps convolution states with their channels first.
    """
    shapes = [tuple(int(n) for n in shape) for shape in spec.shapes]
    kinds = {
        "MAMBA1": ("conv", "ssm"),
        "MAMBA2": ("conv", "ssm"),
        "GDN_ATTN": ("conv", "ssm"),
        "SHORT_CONV": ("conv",),
        "LINEAR": ("ssm",),
    }.get(spec.mamba_type.name, ())
    known = _blocks(spec.mamba_type.name, shapes, width, groups, channels_first) if len(kinds) == len(shapes) else None
    if known is None:
        kinds = ("opaque",) * len(shapes)
    states = tuple(
        PackedState(kind, shape, str(dtype).removeprefix("torch."), dtype.itemsize)
        for kind, shape, dtype in zip(kinds, shapes, spec.dtypes, strict=True)
    )
    heads = shapes[kinds.index("ssm")][0] * width if "ssm" in kinds else 0
    return Packing(states, known or None, heads)


def _blocks(
    kind: str, shapes: list[tuple[int, ...]], width: int, groups: int | None, channels_first: bool
) -> Groups | None:
    """Blocks of channels of the whole model; empty for one block, ``None`` if they are not known."""
    if kind in ("MAMBA1", "SHORT_CONV", "LINEAR"):
        return []
    channels = shapes[0][0 if channels_first else 1]
    heads, dim, inner = shapes[1]
    values = heads * dim
    # Mamba2: values, and a block B and C with the state's size for each group. GDN: keys twice, and values.
    rest, odd = divmod(channels - values, 2)
    if odd or rest < 1 or rest % inner:
        return None
    local = rest // inner
    if kind == "GDN_ATTN":
        keys = (rest * width, local * width)
        return [keys, keys, (values * width, heads * width)]
    if width == 1:
        total = local
    elif groups is not None and groups % width == 0 and groups == local * width:
        total = groups
    elif groups == local == 1:  # each rank has the only group
        total = 1
    else:
        return None
    each = (total * inner, total)
    return [(values * width, heads * width), each, each]
