"""Turns the pools of an engine into components, without depending on the pools' classes.

`from_pools` recognises pools by their methods and attributes (`_families`), reads their lists of buffers (`_lists`),
names each buffer by its layer, and views it in global coordinates (`_views`). `PoolGeometry` has the numbers that pools
lack.
"""

from __future__ import annotations

from ._from_pools import from_pools
from ._geometry import PageField, PoolGeometry, StateTensor

__all__ = ["PageField", "PoolGeometry", "StateTensor", "from_pools"]
