"""Staging, the second strategy: gather at the source, move large blocks, scatter at the destination.

Two sides may cut a page into small blocks. With unequal tensor parallelism and the token outermost, there is one block
for each token. Most of the time then goes into a library's cost for each block. A staged component moves through
*rings*. A ring is registered memory of fixed size, on both sides, that belongs to no component:

1. Prefill asks for space in decode's ring, one *parcel* at a time, once the bytes of a push can be read.
2. Decode grants space in the order in which it was asked for, over all rooms and writers. If there is none, the parcel
   waits. No writer gets more than half of the space that is left, because it may die, and its space would be
   quarantined.
3. Prefill takes space in its own ring, gathers, writes one block from ring to ring, tells decode, and gives its space
back.
4. Decode scatters the parcel, and grants the space to the next one.

There is no deadlock: a parcel takes space in prefill's ring only when it has space in decode's, and then it needs
nothing else. So rooms can share rings that are much smaller than a request. Space of a failed room is given back when
it is neither written nor read, and counts as quarantined until then.
"""

from __future__ import annotations

from ._strategy import Staged

__all__ = ["Staged"]
