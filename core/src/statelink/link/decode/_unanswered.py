"""Says why a prefill instance is not ready: in the reasons of rooms that wait for it, and in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink._logs import logger
from statelink.link.peers import Explaining, InstanceState
from statelink.wire import Trouble, parse_endpoint

if TYPE_CHECKING:
    from statelink.link.peers import Rendezvous
    from statelink.wire import Channel

    from ._instance import Instance

__all__ = ["Unanswered"]

log = logger("statelink.link")

UNANSWERED_SECONDS = 5.0
"""Seconds without an answer after which the log says so."""
REFUSED_SHARE = 0.25
"""The part of ``liveness`` for which an address is tried that refuses connections. A process may be about to listen."""
MOST_NAMED_ADDRESSES = 4
"""Most addresses that a text names."""


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
