"""Which transport carries the bytes to a peer, as far as the library's rules of choice leave only one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from statelink.backend import UNKNOWN

if TYPE_CHECKING:
    from statelink.backend import Region

    from ._options import Options
    from ._tables import Offer

__all__ = ["possible", "told"]

AUTO_XGMI = "MORI_DISABLE_AUTO_XGMI"


def possible(options: Options, environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """What an engine with these options may use. With 0 in the environment, the library adds XGMI to RDMA by itself."""
    added = {"XGMI"} if "RDMA" in options.backends and environment.get(AUTO_XGMI, "").startswith("0") else set()
    return frozenset(name.lower() for name in options.backends.keys() | added)


def told(options: Options, offered: Offer, ours: Any, regions: Sequence[Region]) -> str:
    """The one transport that is left to a peer, or `UNKNOWN`.

    XGMI serves a pair of memories if both are a GPU's, in one node, and the two can reach each other; the library takes
    the network for all others, and nothing says which pairs it can serve.

    Args:
        options: Ours.
        offered: What the peer said of itself.
        ours: The library's descriptor of our engine.
        regions: All memory of both sides.
    """
    left = set(possible(options))
    apart = ours.node_id != offered.engine.node_id
    if len(left) > 1 and (apart or all(each.kind == "dram" for each in regions)):
        left.discard("xgmi")
    return left.pop() if len(left) == 1 else UNKNOWN
