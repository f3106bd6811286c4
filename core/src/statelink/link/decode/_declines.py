"""Tells a prefill instance of uses that this side gave up before it asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink import wire
from statelink.link.peers import InstanceState

from ._postponed import Postponed

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.link._header import RoomKey

    from ._instance import Instance
    from ._unmet import UnmetUses

__all__ = ["Declines"]


class Declines:
    """Sends Failed to every rank of an instance: to those that answer at once, and to all when it is ready.

    The rooms of these ranks may be open, and wait for a request. Belongs to the control thread.

    Args:
        context: The link's parts.
        unmet: Keeps uses of ids that ended, and for which prefill may not have had a room.
    """

    def __init__(self, context: Context, unmet: UnmetUses) -> None:
        self._context = context
        self._unmet = unmet
        self._postponed = Postponed()

    def add(
        self,
        key: RoomKey,
        generation: int,
        instance: Instance,
        reason: Reason,
        until: float,
        *,
        for_all: bool,
    ) -> None:
        """Tell an instance that a use of an id has ended here. Decode never asked that instance for it.

        Args:
            key: The room id and the attempt.
            generation: The number that this side drew for the use.
            instance: The instance.
            reason: Why it has ended.
            until: When to give it up, on the link's clock, if the instance is not ready before.
            for_all: Whether no other decode instance will ask for the room either, as the engine says.
        """
        ended = self._context.now()

        def tell(instance: Instance) -> None:
            self._tell(key, generation, instance, reason, ended, for_all)

        tell(instance)
        if instance.state is not InstanceState.READY and until > self._context.now():
            self._postponed.add(generation, instance, until, tell)

    def beat(self, now: float) -> None:
        """Give up those whose time is over."""
        self._postponed.beat(now)

    def _tell(
        self, key: RoomKey, generation: int, instance: Instance, reason: Reason, ended: float, for_all: bool
    ) -> None:
        known = {address: rank for address, rank in instance.ranks.items() if rank.handshake is not None}
        complete = instance.state is InstanceState.READY
        names = [each.name for each in known.values()] if complete else None
        self._unmet.ended(key, generation, names)
        for address, rank in known.items():
            failed = wire.Failed(
                sender=self._context.name,
                to=rank.name,
                room=key[0],
                generation=generation,
                reason=reason,
                attempt=key[1],
                declined=for_all,
                ended_ms_ago=int(1000 * (self._context.now() - ended)),
            )
            self._context.send(failed, address)
