"""The engine's pools in Statelink's words, and a link over them: all that each side says of itself to the other."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import statelink
from statelink.state import Inventory, aux_rows, describe, kv_pages, mamba_slots
from statelink_demo.model import model_revision
from statelink_demo.pools import KV, MAMBA, METADATA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.messages import Settings
    from statelink_demo.pools import StatePools

__all__ = ["describe_pools", "linked"]


def describe_pools(instance: str, pools: StatePools, revision: str) -> Inventory:
    """Describe every pool of a rank that holds the whole model.

    Args:
        instance: Name of the instance.
        pools: Its pools.
        revision: The model's identity; the two sides refuse each other if it differs.
    """
    pages = {layer: (pools.k[layer], pools.v[layer]) for layer in pools.k}
    components = [
        kv_pages(pages, heads=pools.kv_heads, name=KV),
        mamba_slots(
            conv=pools.conv,
            ssm=pools.recurrent,
            conv_groups=pools.conv_groups,
            heads=pools.value_heads,
            name=MAMBA,
        ),
        aux_rows(pools.rows, name=METADATA),
    ]
    return describe(instance, components, model=revision)


@contextmanager
def linked(
    role: Literal["prefill", "decode"], settings: Settings, model: Qwen3NextForCausalLM, pools: StatePools
) -> Iterator[statelink.Link]:
    """Open a link over all of a worker's pools, and close it before the process may end well.

    Raises:
        StatelinkError: The backend is not there, or cannot run here.
        SystemExit: Something of the link outlived it.
    """
    config = {"role": role, "backend": settings.backend, "deadline": settings.timeout}
    with statelink.open(config, describe_pools(role, pools, model_revision(model))) as link:
        yield link
        if not link.close():
            sys.exit(f"the link of {role} did not close in time")
