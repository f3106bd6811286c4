"""The second strategy: gather at the source, move in large pieces, scatter on arrival.

Where two sides cut a page into small pieces (heads of unequal tensor parallelism with the token outermost: one block a
token), a library's cost per block is most of the time. A staged component goes through *rings*, registered memory of
fixed size on both sides that belongs to no component:

1. Prefill asks for space in decode's ring, a *parcel* at a time, once the bytes of a push are there to be read.
2. Decode lends space in the order in which it was asked for, across all rooms and writers: who finds none waits. No
   writer gets more than half of what is left: it may die, and take what it holds with it.
3. Prefill takes space of its own, gathers, writes one block from ring to ring, says so, and gives its own back.
4. Decode scatters what has come, and lends the space to the next.

Nobody waits for one kind of space while holding what another waits for: own space is only taken by who holds the other
side's, and then needs nothing else to go on. So rooms share rings that are much smaller than a request, and none waits
for ever. Space of a room that failed is given back when nothing can be written to it, or read from it, any more; until
then it is counted as quarantined.
"""

from __future__ import annotations

from ._strategy import Staged

__all__ = ["Staged"]
