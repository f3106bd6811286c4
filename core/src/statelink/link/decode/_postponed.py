"""What prefill instances are told of rooms that this side did not ask for: that it will not, or that it will later.

An instance that is not ready yet is told once it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from typing import TYPE_CHECKING

from statelink import wire
from statelink.link.peers import InstanceState

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._context import Context

    from ._instance import Instance, PrefillRank
    from ._unmet import UnmetUses

__all__ = ["Declines", "Leases"]

MOST_CALLS = 4096
"""Most calls of one kind that wait. If there are more, the oldest is dropped."""
LONGEST_LEASE_MS = 1 << 40


class _Postponed:
    """Calls functions with an instance once it is ready, unless it is refused or their time is over.

    Each call keeps its instance, as a room does. Belongs to the control thread.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[Hashable, _Call] = OrderedDict()

    def _postpone(self, key: Hashable, instance: Instance, until: float, function: Callable[[Instance], None]) -> None:
        """Call a function when an instance is ready.

        Args:
            key: A later call with the same key replaces this one.
            instance: The instance, which is not ready.
            until: When to drop the call, on the link's clock.
            function: Gets the instance.
        """
        self._drop(key)
        self._calls[key] = _Call(instance, until, function, lambda: self._calls.pop(key, None))
        while len(self._calls) > MOST_CALLS:
            self._drop(next(iter(self._calls)))

    def beat(self, now: float) -> None:
        """Drop the calls whose time is over."""
        for key in [key for key, call in self._calls.items() if call.until <= now]:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        call = self._calls.get(key)
        if call is not None:
            call.drop()


class Declines(_Postponed):
    """Sends Failed to every rank of an instance: to those that answer at once, and to all when it is ready.

    The rooms of these ranks may be open, and wait for a request. Belongs to the control thread.

    Args:
        context: The link's parts.
        unmet: Keeps uses of ids that ended, and for which prefill may not have had a room.
    """

    def __init__(self, context: Context, unmet: UnmetUses) -> None:
        super().__init__()
        self._context = context
        self._unmet = unmet

    def add(self, room: int, generation: int, instance: Instance, reason: Reason, until: float) -> None:
        """Tell an instance that a use of an id has ended here. Decode never asked that instance for it.

        Args:
            room: The room id.
            generation: The number that this side drew for the use.
            instance: The instance.
            reason: Why it has ended.
            until: When to give it up, on the link's clock, if the instance is not ready before.
        """
        ended = self._context.now()

        def tell(instance: Instance) -> None:
            self._tell(room, generation, instance, reason, ended)

        tell(instance)
        if instance.state is not InstanceState.READY and until > self._context.now():
            self._postpone(generation, instance, until, tell)

    def _tell(self, room: int, generation: int, instance: Instance, reason: Reason, ended: float) -> None:
        known = {address: rank for address, rank in instance.ranks.items() if rank.handshake is not None}
        complete = instance.state is InstanceState.READY
        names = [each.name for each in known.values()] if complete else None
        self._unmet.ended(room, generation, names)
        for address, rank in known.items():
            failed = wire.Failed(
                sender=self._context.name,
                to=rank.name,
                room=room,
                generation=generation,
                reason=reason,
                ended_ms_ago=int(1000 * (self._context.now() - ended)),
            )
            self._context.channel.send(failed, address)


class Leases(_Postponed):
    """Sends Keep to every rank of an instance when it is ready. Belongs to the control thread.

    Args:
        context: The link's parts.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def add(self, room: int, instance: Instance, until: float) -> None:
        """Ask an instance to keep the state of a request that this side will ask for later.

        Args:
            room: The room id.
            instance: The instance.
            until: For how long, on the link's clock.
        """
        if instance.state is InstanceState.READY:
            self._tell(room, instance, until)
        else:
            self._postpone(room, instance, until, lambda instance: self._tell(room, instance, until))

    def _tell(self, room: int, instance: Instance, until: float) -> None:
        left = int(min(max(0.0, 1000 * (until - self._context.now())), LONGEST_LEASE_MS))
        for address, rank in instance.ranks.items():
            keep = wire.Keep(sender=self._context.name, to=rank.name, room=room, lease_ms=left)
            self._context.channel.send(keep, address)


class _Call:
    """A call that waits for an instance. The instance knows it as one of its users, as it knows rooms."""

    def __init__(
        self, instance: Instance, until: float, function: Callable[[Instance], None], forget: Callable[[], object]
    ) -> None:
        self.until = until
        self._instance = instance
        self._function = function
        self._forget = forget
        instance.rooms[self] = None

    def drop(self) -> None:
        """Let go of the instance, and never call the function."""
        self._forget()
        self._instance.rooms.pop(self, None)

    def instance_ready(self, instance: Instance) -> None:
        """See `InstanceUser.instance_ready`."""
        self.drop()
        self._function(instance)

    def instance_refused(self, reason: Reason) -> None:
        """See `InstanceUser.instance_refused`: the instance's rooms cannot be this link's."""
        self.drop()

    def rank_lost(self, rank: PrefillRank, why: str) -> None:
        """See `InstanceUser.rank_lost`. The function is called when the instance is ready again."""

    def instance_silent(self, instance: Instance, limit: float) -> None:
        """See `InstanceUser.instance_silent`. The call has a limit of its own."""

    def waits_at(self, addresses: Container[str]) -> bool:
        """See `InstanceUser.waits_at`. No rank was asked for anything."""
        return False

    def move(self, instance: Instance) -> None:
        """See `InstanceUser.move`."""
        self._instance = instance
        instance.rooms[self] = None
