"""The threads of a link.

One *control thread* runs `Loop`. It alone changes rooms and peers, it does one thing at a time, and it never blocks. A
message, a timer or a posted job wakes it. A job that was posted quietly waits until something else does.

*Data threads* run calls that may block: those of the backend, of strategies' hooks and of the rendezvous. They also
compute digests and read large handshakes. They belong to `Workers`, which keeps the jobs of one key in order. A
submitted job wakes them. A data thread does not change a room: it posts its result to the control thread. Handing work
from one thread to another may take 5 ms while the engine's thread computes, since the interpreter switches threads no
sooner. So a job does as much as it can before it posts its result.

Where a job is known never to block, the control thread runs it itself (`KeyedExecutor.run_here`,
`Workers.fence_here`), in its place among the jobs of its key.
"""

from __future__ import annotations

from ._executor import HELD_AFTER_SECONDS, Job, KeyedExecutor, KeyOrder
from ._loop import Bell, Flag, Loop
from ._workers import MakeExecutor, Workers

__all__ = [
    "HELD_AFTER_SECONDS",
    "Bell",
    "Flag",
    "Job",
    "KeyOrder",
    "KeyedExecutor",
    "Loop",
    "MakeExecutor",
    "Workers",
]
