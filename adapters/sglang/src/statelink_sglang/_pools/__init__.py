"""Describes the memory of SGLang's pools as components, in the whole model's numbers.

`from_pools` recognises a pool by its methods and attributes (`_from_pools`), reads its lists of buffers (`_lists`),
names each buffer by its layer, and says how an item lies in memory (`_layouts`). `Geometry` has what pools lack.
"""

from __future__ import annotations

from ._from_pools import from_pools
from ._geometry import Element, Geometry, StateTensor

__all__ = ["Element", "Geometry", "StateTensor", "from_pools"]
