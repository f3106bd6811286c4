"""What SGLang does otherwise in some of the releases that the adapter knows, where its code has to follow."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from ._seam import SEAM

__all__ = ["BEHAVIOUR"]


class Behaviour(NamedTuple):
    """What a release of SGLang does.

    Attributes:
        until: The place of the time limit in an entry of ``DecodeTransferQueue._deferred_releases``.
        device_only: The value of ``disaggregation_decode_host_receive_threshold`` with which nothing is received into
            memory of the host.
        agrees: Whether the ranks of decode agree on the round in which they give the memory of a failed request back.
        counts_held: Whether a scheduler that holds such memory says that it is not idle.
        stages_agree: Whether a pipeline stage of prefill fails a new request only when all stages do.
        lists_prefix: State types of which decode lists the pages of its prefix, too, although they need not arrive.
        checkpoint: The function with which the prefix cache takes what a request has computed.
        computed: How many tokens a request has once the forward pass has run in which it is.
        loads_linkers: Whether SGLang loads a linker by its name.
    """

    until: int = 2
    device_only: float = 1
    agrees: bool = True
    counts_held: bool = True
    stages_agree: bool = True
    lists_prefix: frozenset[str] = frozenset()
    checkpoint: str = "checkpoint_kv_cache"
    computed: Callable[[Any], int] = attrgetter("extend_end")
    loads_linkers: bool = True


INDEX_KEYS = frozenset({"dsa", "minimax_index_k"})
RELEASES = {
    "0.5.22": Behaviour(agrees=False, counts_held=False, lists_prefix=INDEX_KEYS, loads_linkers=False),
    "0.5.21": Behaviour(
        until=1,
        device_only=0,
        agrees=False,
        counts_held=False,
        stages_agree=False,
        lists_prefix=INDEX_KEYS,
        checkpoint="maybe_cache_unfinished_req",
        computed=attrgetter("extend_range.end"),
        loads_linkers=False,
    ),
}

BEHAVIOUR = RELEASES.get(SEAM.release(), Behaviour())
"""What the installed SGLang does. A release that the adapter does not know is taken for the newest one."""
