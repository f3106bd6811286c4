"""Looks up where the ranks of a prefill instance are, and where the other ranks of this link's own instance are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from statelink import wire
from statelink.link.peers import InstanceState, Naming, find_siblings

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.wire import Endpoint, Handshake

    from ._instance import Instance

__all__ = ["LookUp"]

LOOK_UP_SECONDS = 0.5
"""Seconds between two look-ups of an instance that is not complete."""

Found = Callable[["Instance", "tuple[Endpoint, ...]", list[str]], None]


class LookUp:
    """Asks the rendezvous, on data threads. Belongs to the control thread, on which it calls back.

    Args:
        context: The link's parts.
        found: Called with an instance that is looked up for the first time, the addresses of its ranks, and those of
            this link's siblings.
        moved: Called with the same if an instance that is being greeted is at other addresses by now.
        refuse: Called with an instance that cannot be found, and why.
    """

    def __init__(
        self, context: Context, found: Found, moved: Found, refuse: Callable[[Instance, Reason], None]
    ) -> None:
        self._context = context
        self._found, self._moved, self._refuse = found, moved, refuse
        self._again: set[Instance] = set()
        """Instances for which another look-up is under way."""
        self.siblings = [str(wire.parse_endpoint(address)) for address in context.config.siblings]
        self._known = context.inventory.ranks == 1 or bool(self.siblings) or not context.config.rendezvous
        """Whether a directory need not be asked for them."""

    def set_siblings(self, siblings: list[str]) -> None:
        """Use these addresses of siblings from now on, and ask nobody."""
        self.siblings, self._known = siblings, True

    def begin(self, instance: Instance) -> None:
        """Look an instance up. Repeats this until the instance is complete, or is dropped."""
        if instance.state is not InstanceState.RESOLVING:
            return

        def then(found: tuple[tuple[Endpoint, ...] | None, list[str] | None] | None, why: Reason | None) -> None:
            if instance.state is not InstanceState.RESOLVING:
                return
            if found is None:
                assert why is not None
                self._refuse(instance, why)
            elif found[0] is None or found[1] is None:
                self._context.after(LOOK_UP_SECONDS, lambda: self.begin(instance))
            else:
                self._found(instance, found[0], self._take(found[1]))

        self._ask(instance, then)

    def again(self, instance: Instance) -> None:
        """Look an instance up once more, since one of its ranks does not answer, or another process answers for it.

        Does nothing if the engine gave addresses, or while such a look-up is under way.
        """
        if not instance.named or instance in self._again:
            return
        self._again.add(instance)

        def then(found: tuple[tuple[Endpoint, ...] | None, list[str] | None] | None, why: Reason | None) -> None:
            self._again.discard(instance)
            if found is None or found[0] is None or found[1] is None or instance.state is not InstanceState.GREETING:
                return
            siblings = self._take(found[1])
            if list(map(str, found[0])) != list(instance.ranks) or set(siblings) != set(instance.siblings):
                self._moved(instance, found[0], siblings)

        self._ask(instance, then)

    def _ask(
        self,
        instance: Instance,
        then: Callable[[tuple[tuple[Endpoint, ...] | None, list[str] | None] | None, Reason | None], None],
    ) -> None:
        context = self._context
        known = self.siblings if self._known else None

        # Runs on a data thread, since the rendezvous may block.
        def job() -> tuple[tuple[Endpoint, ...] | None, list[str] | None]:
            rendezvous = context.rendezvous
            found = rendezvous.resolve(instance.peer)
            if known is not None:
                return found, known
            return found, find_siblings(rendezvous, context.inventory.instance, context.channel.endpoint)

        context.workers.run(context.workers.setups.submit, ("resolve", instance.key), job, then)

    def _take(self, siblings: list[str]) -> list[str]:
        """The siblings that count: those that were found, unless others were set during the look-up."""
        if not self._known:
            self.siblings = siblings
        return self.siblings

    def is_other(self, instance: Instance, handshake: Handshake, *, sibling: bool) -> bool:
        """Whether a handshake is of another instance than the directory said.

        Somebody else may listen where a process of that instance did.
        """
        rendezvous = self._context.rendezvous
        if not isinstance(rendezvous, Naming) or (sibling and self._known):
            return False
        name = self._context.inventory.instance if sibling else instance.peer
        return rendezvous.names(name) and handshake.inventory.instance != name
