"""Prefill: rooms that send.

`PrefillRole` finds the room that a message is about, and calls it. `SendingState` is the room: it owns the queue of
pushes and one `OutgoingDelivery` for each destination. `DecodeRanks` keeps the peers. `Requests` keeps decode's
requests until they meet a room, and remembers rooms that are over (`Tombstones`).

The control thread owns all of these. A message of a decode rank, a timer, a job that `Sending` posts, or the result of
a data thread wakes it. A room that opens wakes it only if something waits for the room. Two things belong to other
threads. `PushChecks` belongs to the engine's threads: they check a push before they post it. `Pusher` belongs to the
jobs with the peer's key: they plan a push, call the send hooks and move the bytes. These jobs run on data threads. So a
push crosses threads three times: engine to control, control to data, and data to control. Where nothing blocks, the
control thread runs the jobs of small pushes itself. The jobs of a peer are those of its `Line`, which lets pushes take
turns.
"""

from __future__ import annotations

from ._requests import Wanted
from ._role import PrefillRole
from ._sending import Sending

__all__ = ["PrefillRole", "Sending", "Wanted"]
