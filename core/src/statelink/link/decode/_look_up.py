"""Looks up where the ranks of prefill's and this link's own instance are, and says why an instance is not ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from statelink import wire
from statelink._logs import logger
from statelink.link.peers import Explaining, InstanceState, Naming, find_siblings
from statelink.wire import Trouble, parse_endpoint

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.link.peers import Rendezvous
    from statelink.wire import Channel, Endpoint, Handshake

    from ._instance import Instance

__all__ = ["LookUp", "Unanswered"]

LOOK_UP_SECONDS = 0.5
"""Seconds between two look-ups of an instance that is not complete."""

Found = Callable[["Instance", "tuple[Endpoint, ...]", list[str]], None]

log = logger("statelink.link")

UNANSWERED_SECONDS = 5.0
"""Seconds without an answer after which the log says so."""
REFUSED_SHARE = 0.25
"""The part of ``liveness`` for which an address is tried that refuses connections. A process may be about to listen."""
MOST_NAMED_ADDRESSES = 4
"""Most addresses that a text names."""


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

        context.workers.run(context.workers.setups, ("resolve", instance.key), job, then)

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


class Unanswered:
    """Says which addresses do not answer, and why. Belongs to the control thread; none of its methods blocks.

    Args:
        name: The link's name.
        channel: The sockets, which know why an address does not answer.
        rendezvous: Where instances are looked up.
    """

    def __init__(self, name: str, channel: Channel, rendezvous: Rendezvous) -> None:
        self._name = name
        self._channel = channel
        self._rendezvous = rendezvous
        self._warned: dict[str, float] = {}
        """Per instance, when it entered the state that the log has warned of."""

    def look(self, instance: Instance, now: float) -> None:
        """Log one warning for each state in which an instance stays without an answer. Called with every heartbeat."""
        if instance.state is InstanceState.READY:
            self._warned.pop(instance.key, None)
        if instance.state not in (InstanceState.RESOLVING, InstanceState.GREETING) or not instance.rooms:
            return
        for address in instance.unanswered:  # the call makes the channel take note of the sockets' events
            self._channel.trouble(address)
        if now - instance.since > UNANSWERED_SECONDS and self._warned.get(instance.key) != instance.since:
            self._warned[instance.key] = instance.since
            cause, hint = self.explain(instance)
            waited = f"{self._name} has waited {now - instance.since:.0f} s"
            log.warning("%s: %s%s", waited, cause, f"; {hint}" if hint else "")

    def limit(self, instance: Instance, liveness: float) -> float:
        """Seconds after which nobody waits for an instance any more: fewer where an address refuses connections."""
        refused = any(self._channel.trouble(address) is Trouble.REFUSED for address in instance.unanswered)
        return liveness * REFUSED_SHARE if refused else liveness

    def forget(self, instance: Instance) -> None:
        """Forget an instance that is dropped."""
        self._warned.pop(instance.key, None)

    def explain(self, instance: Instance) -> tuple[str, str]:
        """Why an instance is not ready, and a hint what to look at."""
        cause = f"prefill instance {instance.called} is still {instance.state.value}"
        if instance.state is InstanceState.RESOLVING:
            rendezvous = self._rendezvous
            why, hint = rendezvous.explain(instance.peer) if isinstance(rendezvous, Explaining) else ("", "")
            usual = "is every rank of prefill registered, under this name, with the same rendezvous server?"
            return f"{cause}; {why}" if why else cause, hint or usual
        silent = instance.unanswered
        if instance.state is not InstanceState.GREETING or not silent:
            return cause, "is prefill running, and the address right?"
        troubles = [self._trouble(instance, address) for address in silent]
        named = [
            f"{parse_endpoint(address).address} ({what})"
            for address, (what, _) in zip(silent[:MOST_NAMED_ADDRESSES], troubles, strict=False)
        ]
        more = f" and {len(silent) - MOST_NAMED_ADDRESSES} more" if len(silent) > MOST_NAMED_ADDRESSES else ""
        hints = dict.fromkeys(hint for _, hint in troubles)
        return f"{cause}; no answer from {', '.join(named)}{more}", " ".join(list(hints)[:2])

    def _trouble(self, instance: Instance, address: str) -> tuple[str, str]:
        """Why nobody of the instance answers at an address, and a hint."""
        other = instance.others.get(address)
        if other is not None:
            return f"instance {other!r:.80} is there", "has the instance moved, and not registered again yet?"
        trouble = self._channel.trouble(address) or Trouble.MUTE
        return trouble.what, self._channel.hint(trouble)
