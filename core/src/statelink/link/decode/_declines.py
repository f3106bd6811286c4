"""Tells a prefill instance of uses that this side gave up before it asked for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import TYPE_CHECKING

from statelink import wire
from statelink.link.peers import InstanceState

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.link._header import RoomKey

    from ._instance import Instance
    from ._prefill_rank import PrefillRank
    from ._unmet import UnmetUses

__all__ = ["Declines"]

MOST = 4096
"""Most uses that wait until their instance can be told. If there are more, this side gives up telling the oldest."""


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
        self._waiting: OrderedDict[int, _Declined] = OrderedDict()

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
        declined = _Declined(self, key, generation, reason, until, for_all)
        self._tell(declined, instance)
        if instance.state is InstanceState.READY or until <= self._context.now():
            return
        self._waiting[generation] = declined
        declined.wait_for(instance)
        while len(self._waiting) > MOST:
            self._waiting.popitem(last=False)[1].give_up()

    def ready(self, declined: _Declined, instance: Instance) -> None:
        """An instance that had to be told is ready."""
        self.forget(declined)
        self._tell(declined, instance)

    def forget(self, declined: _Declined) -> None:
        """A use need not be told any more."""
        self._waiting.pop(declined.generation, None)

    def beat(self, now: float) -> None:
        """Give up those whose time is over."""
        for declined in [each for each in self._waiting.values() if each.until <= now]:
            self.forget(declined)
            declined.give_up()

    def _tell(self, declined: _Declined, instance: Instance) -> None:
        known = {address: rank for address, rank in instance.ranks.items() if rank.handshake is not None}
        complete = instance.state is InstanceState.READY
        names = [each.name for each in known.values()] if complete else None
        self._unmet.ended(declined.key, declined.generation, names)
        for address, rank in known.items():
            failed = wire.Failed(
                sender=self._context.name,
                to=rank.name,
                room=declined.room,
                generation=declined.generation,
                reason=declined.reason,
                attempt=declined.key[1],
                declined=declined.for_all,
            )
            self._context.send(failed, address)


class _Declined:
    """One use that an instance has to be told of: it keeps the instance as a room does."""

    def __init__(
        self, declines: Declines, key: RoomKey, generation: int, reason: Reason, until: float, for_all: bool
    ) -> None:
        self.key = key
        self.room = key[0]
        self.generation = generation
        self.reason = reason
        self.until = until
        self.for_all = for_all
        self._declines = declines
        self._instance: Instance | None = None

    def wait_for(self, instance: Instance) -> None:
        """Keep the instance, until it is ready."""
        self._instance = instance
        instance.join(self)

    def give_up(self) -> None:
        """Let go of the instance."""
        if self._instance is not None:
            self._instance.leave(self)

    def instance_ready(self, instance: Instance) -> None:
        """See `InstanceUser.instance_ready`."""
        instance.leave(self)
        self._declines.ready(self, instance)

    def instance_refused(self, reason: Reason) -> None:
        """See `InstanceUser.instance_refused`: prefill's rooms cannot be this link's."""
        self._declines.forget(self)
        self.give_up()

    def rank_lost(self, rank: PrefillRank, why: str) -> None:
        """See `InstanceUser.rank_lost`. It is told when the instance is ready again."""

    def waits_at(self, addresses: Container[str]) -> bool:
        """See `InstanceUser.waits_at`. No rank was asked for this use."""
        return False

    def move(self, instance: Instance) -> None:
        """See `InstanceUser.move`."""
        self._instance = instance
        instance.join(self)
