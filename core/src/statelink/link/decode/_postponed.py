"""Calls about prefill instances that are not ready yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statelink.errors import Reason

    from ._instance import Instance
    from ._prefill_rank import PrefillRank

__all__ = ["Postponed"]

MOST = 4096
"""Most calls that wait. If there are more, the oldest is dropped."""


class Postponed:
    """Calls functions with an instance once it is ready, unless it is refused or their time is over.

    Each call keeps its instance, as a room does. Belongs to the control thread.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[Hashable, _Call] = OrderedDict()

    def add(self, key: Hashable, instance: Instance, until: float, function: Callable[[Instance], None]) -> None:
        """Call a function when an instance is ready.

        Args:
            key: A later call with the same key replaces this one.
            instance: The instance, which is not ready.
            until: When to drop the call, on the link's clock.
            function: Gets the instance.
        """
        self._drop(key)
        self._calls[key] = _Call(instance, until, function, lambda: self._calls.pop(key, None))
        while len(self._calls) > MOST:
            self._drop(next(iter(self._calls)))

    def beat(self, now: float) -> None:
        """Drop the calls whose time is over."""
        for key in [key for key, call in self._calls.items() if call.until <= now]:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        call = self._calls.get(key)
        if call is not None:
            call.drop()


class _Call:
    """A call that waits for an instance. The instance knows it as one of its users, as it knows rooms."""

    def __init__(
        self, instance: Instance, until: float, function: Callable[[Instance], None], forget: Callable[[], object]
    ) -> None:
        self.until = until
        self._instance = instance
        self._function = function
        self._forget = forget
        instance.join(self)

    def drop(self) -> None:
        """Let go of the instance, and never call the function."""
        self._forget()
        self._instance.leave(self)

    def instance_ready(self, instance: Instance) -> None:
        """See `InstanceUser.instance_ready`."""
        self.drop()
        self._function(instance)

    def instance_refused(self, reason: Reason) -> None:
        """See `InstanceUser.instance_refused`: the instance's rooms cannot be this link's."""
        self.drop()

    def rank_lost(self, rank: PrefillRank, why: str) -> None:
        """See `InstanceUser.rank_lost`. The function is called when the instance is ready again."""

    def waits_at(self, addresses: Container[str]) -> bool:
        """See `InstanceUser.waits_at`. No rank was asked for anything."""
        return False

    def move(self, instance: Instance) -> None:
        """See `InstanceUser.move`."""
        self._instance = instance
        instance.join(self)
