"""A worker's link: opened over its pools, and closed before the process may end well."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import statelink
from statelink_demo.inventory import describe_pools
from statelink_demo.model import model_revision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.messages import Start
    from statelink_demo.pools import StatePools

__all__ = ["linked"]


@contextmanager
def linked(
    role: Literal["prefill", "decode"], start: Start, model: Qwen3NextForCausalLM, pools: StatePools
) -> Iterator[statelink.Link]:
    """Open a link over all of a worker's pools.

    Raises:
        StatelinkError: The backend is not there, or cannot run here.
        SystemExit: Something of the link outlived it.
    """
    inventory = describe_pools(role, pools.layouts(), model_revision(model))
    config = {"role": role, "backend": start.backend, "deadline": start.deadline}
    with statelink.open(config, inventory) as link:
        yield link
        if not link.close():
            sys.exit(f"the link of {role} did not close in time")
