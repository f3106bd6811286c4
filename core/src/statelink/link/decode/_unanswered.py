"""Why a prefill instance is not ready yet, in words: for the reasons of rooms that wait for it, and for the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from statelink.link.peers import Explaining, InstanceState
from statelink.wire import Trouble, parse_endpoint

if TYPE_CHECKING:
    from statelink.link._context import Context

    from ._instance import Instance

__all__ = ["Unanswered"]

log = logging.getLogger("statelink.link")

PATIENCE = 5.0
"""Seconds without an answer after which the log says so."""
MOST_NAMED = 4
"""Addresses that a text names."""


class Unanswered:
    """Asks the sockets and the rendezvous. Belongs to the control thread; none of its methods blocks.

    Args:
        context: The link's parts.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._warned: dict[str, float] = {}  # by instance: since when it was in the state that was complained about

    def look(self, instance: Instance, now: float) -> None:
        """Warn once of each state in which an instance stays because nobody answers. With every beat."""
        if instance.state is InstanceState.READY:
            self._warned.pop(instance.key, None)
        if instance.state not in (InstanceState.RESOLVING, InstanceState.GREETING) or not instance.rooms:
            return
        for address in instance.unanswered:  # also to take from the sockets what they have noted
            self._context.channel.trouble(address)
        if now - instance.since > PATIENCE and self._warned.get(instance.key) != instance.since:
            self._warned[instance.key] = instance.since
            cause, hint = self.explain(instance)
            log.warning("%.0f s: %s%s", now - instance.since, cause, f"; {hint}" if hint else "")

    def forget(self, instance: Instance) -> None:
        """An instance is dropped."""
        self._warned.pop(instance.key, None)

    def explain(self, instance: Instance) -> tuple[str, str]:
        """Why an instance is not ready, and what to look at."""
        cause = f"prefill instance {instance.key} is still {instance.state.value}"
        if instance.state is InstanceState.RESOLVING:
            rendezvous = self._context.rendezvous
            said, hint = rendezvous.explain(instance.peer) if isinstance(rendezvous, Explaining) else ("", "")
            usual = "is every rank of prefill registered, under this name, with the same rendezvous server?"
            return f"{cause}; {said}" if said else cause, hint or usual
        silent = instance.unanswered
        if instance.state is not InstanceState.GREETING or not silent:
            return cause, "is prefill running, and the address right?"
        troubles = [self._context.channel.trouble(address) or Trouble.MUTE for address in silent]
        whom = [
            f"{parse_endpoint(address).address} ({trouble.what})"
            for address, trouble in zip(silent[:MOST_NAMED], troubles, strict=False)
        ]
        more = f" and {len(silent) - MOST_NAMED} more" if len(silent) > MOST_NAMED else ""
        hints = dict.fromkeys(trouble.hint for trouble in troubles)
        return f"{cause}; no answer from {', '.join(whom)}{more}", " ".join(list(hints)[:2])
