"""Prefill: rooms that send.

`PrefillRole` finds the room that a message is about, and calls it. `SendingState` is the room: it owns the queue of
pushes and one `Delivery` for each destination. `DecodeRanks` keeps the peers, and `Requests` keeps what decode asked
for until a room is open, and what is remembered of rooms that are over (`Tombstones`).

The control thread owns all of these. A message of a decode rank, a timer, or a job that `Sending` posts wakes it. Two
things belong to other threads: `Pushes` to the engine's threads, which check what they push before they post it; and
`Pusher` to the jobs with the peer's key, which plan a push, call the strategies and move the bytes. A push so
crosses threads three times: engine to control, control to data, data to control.
"""

from __future__ import annotations

from ._handle import Sending
from ._role import PrefillRole

__all__ = ["PrefillRole", "Sending"]
