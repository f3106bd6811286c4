"""From the pools of an engine to components, without knowing the pools' classes.

`from_pools` tells pools apart by what they offer (`_families`), reads their lists of buffers (`_lists`), names each
buffer by its layer, and views it in global coordinates (`_views`). `PoolGeometry` holds the numbers that pools do not
know.
"""

from __future__ import annotations

from ._from_pools import from_pools
from ._geometry import PageField, PoolGeometry, StateTensor

__all__ = ["PageField", "PoolGeometry", "StateTensor", "from_pools"]
