"""Asks prefill instances to keep the state of requests that this side will ask for later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink import wire
from statelink.link.peers import InstanceState

from ._postponed import Postponed

if TYPE_CHECKING:
    from statelink.link._context import Context
    from statelink.link._header import RoomKey

    from ._instance import Instance

__all__ = ["Leases"]

LONGEST = 1 << 40
"""Most milliseconds of a lease."""


class Leases:
    """Sends Keep to every rank of an instance when it is ready. Belongs to the control thread.

    Args:
        context: The link's parts.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._postponed = Postponed()

    def add(self, key: RoomKey, instance: Instance, until: float) -> None:
        """Ask an instance to keep a request's state.

        Args:
            key: The room id and the attempt.
            instance: The instance.
            until: For how long, on the link's clock.
        """
        if instance.state is InstanceState.READY:
            self._tell(key, instance, until)
        else:
            self._postponed.add(key, instance, until, lambda instance: self._tell(key, instance, until))

    def beat(self, now: float) -> None:
        """Give up those whose time is over."""
        self._postponed.beat(now)

    def _tell(self, key: RoomKey, instance: Instance, until: float) -> None:
        left = int(min(max(0.0, 1000 * (until - self._context.now())), LONGEST))
        for address, rank in instance.ranks.items():
            keep = wire.Keep(sender=self._context.name, to=rank.name, room=key[0], attempt=key[1], lease_ms=left)
            self._context.send(keep, address)
