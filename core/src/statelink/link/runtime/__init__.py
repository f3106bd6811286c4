"""The threads of a link.

One *control thread* runs `Loop`. It alone changes rooms and peers, it does one thing at a time, and it never blocks. A
message, a timer or a posted job wakes it. A job that was posted quietly waits until something else does.

*Data threads* run calls that may block: those of the backend, of strategies' hooks and of the rendezvous. They also
compute digests and read large handshakes. They belong to `Workers`, which keeps the jobs of one key in order. A
submitted job wakes them. A data thread does not change a room: it posts its result to the control thread. Handing work
from one thread to another may take 5 ms while the engine's thread computes, since the interpreter switches threads no
sooner. So a job does as much as it can before it posts its result.

Where a job is known never to block, the control thread runs it itself (`KeyedExecutor.run_here`,
`Workers.run_promptly`), in its place among the jobs of its key.

A push is moved by `move`, which cuts it into batches for the backend, and yields wherever it has to wait.
"""

from __future__ import annotations

from ._executor import HELD_AFTER_SECONDS, Job, KeyedExecutor, KeyOrder
from ._failure import BackendDefect, reason_of
from ._flag import Flag
from ._loop import Bell, Loop
from ._mover import Moving, Steps, Until, move, submit_together, submitted
from ._workers import MakeExecutor, Workers

__all__ = [
    "HELD_AFTER_SECONDS",
    "BackendDefect",
    "Bell",
    "Flag",
    "Job",
    "KeyOrder",
    "KeyedExecutor",
    "Loop",
    "MakeExecutor",
    "Moving",
    "Steps",
    "Until",
    "Workers",
    "move",
    "reason_of",
    "submit_together",
    "submitted",
]
