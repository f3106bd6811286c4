"""The threads of a link.

One *control thread* runs `Loop`: it alone changes rooms and peers, one thing at a time, and never blocks. A message, a
timer or a posted job wakes it.

*Data threads* run what may block: every call of the backend, of a strategy's hook, and of the rendezvous. They belong
to `Workers`, which keeps the jobs of one key in order. A data thread changes nothing of a room: it posts what it found
out to the control thread. Each hand-over to or from a thread waits until the interpreter switches threads, up to 5 ms
while the engine's thread computes. So a job does all that it can before it comes back.

`move` is what a data thread does with a push: it gives blocks to the backend in slices, and yields where it
has to wait.
"""

from __future__ import annotations

from ._executor import HELD_AFTER, Job, KeyedExecutor, KeyOrder
from ._failure import reason_of
from ._loop import Loop
from ._mover import Moving, move
from ._workers import MakeExecutor, Workers

__all__ = [
    "HELD_AFTER",
    "Job",
    "KeyOrder",
    "KeyedExecutor",
    "Loop",
    "MakeExecutor",
    "Moving",
    "Workers",
    "move",
    "reason_of",
]
