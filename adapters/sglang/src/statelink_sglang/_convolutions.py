"""Finds out which channels of a convolution of Mamba 2 a rank has.

The channels are three blocks: x, which is cut by heads, and B and C, which are cut by groups. If the model has one
group, each rank has all of B and C. SGLang's pool has the sum of the channels only. The blocks follow from the model's
configuration, in which each family has names of its own. If they do not give the pool's shape, they are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Blocks", "blocks_of"]

Blocks = list[tuple[int, int]]


class Names(NamedTuple):
    """Under which names a configuration has the numbers of Mamba 2.

    Attributes:
        heads: Heads of the recurrent state.
        dim: Channels of x for each head.
        state: Size of the state, which is that of B and of C for each group.
        groups: Groups of B and C. If there are two names, both must have the same number.
    """

    heads: str
    dim: str
    state: str
    groups: tuple[str, ...]


FAMILIES = {
    "falcon_h1": Names("mamba_n_heads", "mamba_d_head", "mamba_d_state", ("mamba_n_groups",)),
    "granitemoehybrid": Names("mamba_n_heads", "mamba_d_head", "mamba_d_state", ("mamba_n_groups",)),
    "mamba2": Names("num_heads", "head_dim", "state_size", ("n_groups",)),
    # SGLang makes pools by the first name of the groups, and layers by the second.
    "nemotron_h": Names("mamba_num_heads", "mamba_head_dim", "ssm_state_size", ("n_groups", "mamba_n_groups")),
}
"""Types of models that SGLang 0.5.23 runs with its mixer of Mamba 2, `MambaMixer2`."""


def blocks_of(text: Any, cache: Any, width: int) -> Blocks | None:
    """The blocks of channels of the whole model, with the heads or groups in which each is dealt out.

    Args:
        text: The model's configuration.
        cache: The pool's tensors. A rank's convolution is ``[layers, slots, channels, inputs]``, and its recurrent
            state ``[layers, slots, heads, dim, state]``.
        width: Ranks over which the states are sharded.

    Returns:
        The blocks in order, or ``None`` if they are not known.
    """
    names = FAMILIES.get(text.model_type)
    if names is None or len(cache.conv) != 1:
        return None
    numbers = _numbers(text, (names.heads, names.dim, names.state, *names.groups))
    if numbers is None or len({*numbers[3:]}) != 1:
        return None
    heads, dim, inner, groups = numbers[:4]
    if heads % width or (groups > 1 and groups % width):
        return None
    held = (heads // width, dim, inner)
    channels = held[0] * dim + 2 * max(1, groups // width) * inner
    if tuple(cache.temporal.shape[2:]) != held or cache.conv[0].shape[2] != channels:
        return None
    return [(heads * dim, heads), (groups * inner, groups), (groups * inner, groups)]


def _numbers(text: Any, names: Iterable[str]) -> list[int] | None:
    """The numbers of these names, or ``None`` if one of them is missing."""
    found: list[Any] = [getattr(text, name, None) for name in names]
    return found if all(type(each) is int and each > 0 for each in found) else None
