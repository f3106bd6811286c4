"""Decode: rooms that receive.

`DecodeRole` finds the room that a message is about, and calls it. `ReceivingState` is the room: it owns one
`IncomingDelivery` for each prefill rank that owes it bytes. `Instances` keeps the peers. `UnmetUses` keeps the uses of
ids that ended, and for which prefill may not have had a room. `ProcessExits` is the process exit watch: it waits until
nothing of an ended writer can land.

The control thread owns all of these. A message of a prefill rank, a timer, a job that `Receiving` posts, or the result
of a data thread wakes it. A data thread prepares a request with the key of the room (`IncomingDelivery.prepare`: the
hooks, then the grant). A revocation has the same key, so that it never runs before the grant that it revokes. Where
neither blocks, the control thread runs both itself (`IncomingDelivery.prompt`). Hooks of strategies and comparisons of
digests run on data threads, too, and post their results.
"""

from __future__ import annotations

from ._in_flight import LANDING_ROUND_SECONDS
from ._receiving import Receiving
from ._role import DecodeRole

__all__ = ["LANDING_ROUND_SECONDS", "DecodeRole", "Receiving"]
