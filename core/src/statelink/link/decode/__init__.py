"""Decode: rooms that receive.

`DecodeRole` finds the room that a message is about, and calls it. `ReceivingState` is the room: it owns one `Writer`
for each prefill rank that owes it bytes. `Instances` keeps the peers, `Tombstones` the uses of ids that prefill may not
have met, and `ProcessExits` waits until what a dead writer left in its kernel has landed.

The control thread owns all of these. A message of a prefill rank, a timer, or a job that `Receiving` posts wakes it. A
worker prepares a request with the key of the room (`Writer.prepare`: hooks, then the grant); a revocation has the same
key, so that it never comes before the grant that it revokes. Hooks of strategies and comparisons of digests run on
workers, too, and post what they found.
"""

from __future__ import annotations

from ._handle import Receiving
from ._process_exits import LANDING_ROUND
from ._role import DecodeRole

__all__ = ["LANDING_ROUND", "DecodeRole", "Receiving"]
