"""The engine's pools in Statelink's words: all that an engine has to write to be understood by the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.state import Inventory, aux_rows, describe, kv_pages, mamba_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from statelink_demo.layout import PoolLayout

__all__ = ["KV", "MAMBA", "METADATA", "describe_pools"]

KV, MAMBA, METADATA = "kv", "mamba", "metadata"
"""Names of the components: what items are pushed and accepted under."""


def describe_pools(instance: str, layouts: Sequence[PoolLayout], revision: str) -> Inventory:
    """Describe every pool of a rank that holds the whole model.

    Args:
        instance: Name of the instance.
        layouts: Its pools.
        revision: The model's identity; the two sides refuse each other if it differs.
    """
    keys, values = _layers(layouts, "k"), _layers(layouts, "v")
    conv, recurrent = _layers(layouts, "conv"), _layers(layouts, "recurrent")
    heads = {layout.name: layout.heads or 0 for layout in layouts}
    groups = next(layout.groups for layout in layouts if layout.groups)
    rows = {layout.name: layout.tensor for layout in layouts if layout.component == "metadata"}
    components = [
        kv_pages({layer: (keys[layer], values[layer]) for layer in keys}, heads=heads["k"], name=KV),
        mamba_slots(conv=conv, ssm=recurrent, conv_groups=groups, heads=heads["recurrent"], name=MAMBA),
        aux_rows(rows, name=METADATA),
    ]
    return describe(instance, components, model=revision)


def _layers(layouts: Sequence[PoolLayout], name: str) -> dict[int, torch.Tensor]:
    return {layout.layer: layout.tensor for layout in layouts if layout.name == name and layout.layer is not None}
