"""What the adapter changes in SGLang's arguments while SGLang checks them, in every process that does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["AROUND", "around_handle_disaggregation"]

log = logging.getLogger("statelink.sglang")


def around_handle_disaggregation(original: Callable[..., Any], server_args: Any) -> Any:
    """Around ``handle_pd_disaggregation``.

    SGLang refuses its staging buffer with any backend but two. A link has staging of its own, so the variable says
    nothing to it. It is switched off for this process and for those that it starts, and a warning says so.
    """
    from sglang.srt.environ import envs

    staging = envs.SGLANG_DISAGG_STAGING_BUFFER
    if server_args.disaggregation_transfer_backend == "statelink" and staging.get():
        log.warning(
            "SGLANG_DISAGG_STAGING_BUFFER has no effect with the transfer backend 'statelink': a link stages "
            "by itself, if its configuration has 'staging'"
        )
        staging.set(False)
    return original(server_args)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.arg_groups.pd_disaggregation_hook.handle_pd_disaggregation": around_handle_disaggregation,
}
"""Each target, and its hook."""
