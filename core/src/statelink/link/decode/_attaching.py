"""Plans what the ranks of a prefill instance write for this decode rank, and attaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from statelink import wire
from statelink.backend import UNKNOWN
from statelink.errors import PeerError, Reason
from statelink.link.peers import Carrier, InstanceEvent, InstanceState, Witness, check_transport

from ._part import Part, plan_instance

if TYPE_CHECKING:
    from statelink.link._context import Context

    from ._instance import Instance, PrefillRank

__all__ = ["Attaching"]


class Attaching:
    """Brings an instance from the last handshake to the state *ready*. Belongs to the control thread.

    Args:
        context: The link's parts.
        refuse: Called with an instance that cannot work with this one, and why. Sends that to the instance's ranks.
    """

    def __init__(self, context: Context, refuse: Callable[[Instance, Reason], None]) -> None:
        self._context = context
        self._refuse = refuse

    def plan(self, instance: Instance) -> None:
        """All handshakes are there: plan on a data thread, then attach the ranks."""
        self._step(instance, InstanceEvent.ANSWERED)
        turn = instance.turn
        context = self._context
        ranks = {address: rank.handshake for address, rank in instance.ranks.items() if rank.handshake}
        siblings = [handshake for handshake in instance.siblings.values() if handshake]

        # Runs on the control thread.
        def then(parts: dict[str, Part] | None, reason: Reason | None) -> None:
            if instance.turn != turn:
                return  # a rank was lost meanwhile; a new plan follows
            if parts is not None:
                self._attach(instance, parts)
            elif reason is not None:
                self._refuse(instance, reason)

        context.workers.run(
            context.workers.setups,
            ("plan", instance.key),
            lambda: plan_instance(context.handshake, siblings, ranks),
            then,
            backend=context.backend.name,
            peer=instance.key,
        )

    def _attach(self, instance: Instance, parts: dict[str, Part]) -> None:
        self._step(instance, InstanceEvent.ROUTED)
        for address, rank in instance.ranks.items():
            part = parts.get(address)
            if part is None:
                self.detach(rank)
                continue
            if rank.plan is not None and rank.plan.digest == part.plan.digest and rank.attached:
                continue  # only another rank was lost and came back; this one keeps its part
            if rank.assign(part):
                self._send_part(rank)
            else:
                self._connect(instance, rank)
        self._maybe_ready(instance)

    def _send_part(self, rank: PrefillRank) -> None:
        """Send a rank its part. Repeated until the rank confirms, since a connection that breaks loses messages."""
        part = rank.part
        assert part is not None
        attach = wire.Attach(
            sender=self._context.name,
            to=rank.name,
            assignment=part.assignment,
            destinations=part.readers,
            digest=part.plan.digest,
            same_host=rank.witness is not None,
        )
        self._context.channel.send(attach, rank.address)

    def _connect(self, instance: Instance, rank: PrefillRank) -> None:
        """Connect this side's backend to a rank, and send the rank its part after that.

        In this order, the rank's backend finds this side's ready when it connects.
        """
        context = self._context
        handshake = rank.handshake
        assert handshake is not None
        connection = context.connections.join(handshake)
        rank.connection = connection

        # Runs on a data thread.
        def job() -> tuple[Witness | None]:
            witness = Witness.of(handshake.process, rank.endpoint.address)
            context.connections.make(connection)
            return (witness,)

        # Runs on the control thread.
        def then(made: tuple[Witness | None] | None, reason: Reason | None) -> None:
            if rank.connection is not connection:
                return  # the rank was lost meanwhile
            if made is None:
                assert reason is not None
                self._refuse(instance, reason)
                return
            rank.reach(made[0])
            self._send_part(rank)
            self._maybe_ready(instance)

        who = {"backend": context.backend.name, "peer": handshake.link}
        context.workers.run(context.workers.setups, ("peer", handshake.link), job, then, **who)

    def attached(self, instance: Instance, rank: PrefillRank, message: wire.Attached) -> None:
        """A rank confirms its part. It may do so while its backend connects, and then once more after that."""
        require = self._context.config.require
        if rank.plan is None or message.digest != rank.plan.digest or (message.connecting and require):
            return
        transport = message.transport or UNKNOWN
        rank.transport = transport
        try:
            check_transport(require, Carrier(transport), self._context.backend.name, rank.name)
        except PeerError as error:
            self._refuse(instance, error.reason)
            return
        rank.attached, rank.connecting = True, message.connecting
        self._maybe_ready(instance)

    def _maybe_ready(self, instance: Instance) -> None:
        attached = all(each.attached and each.connected for each in instance.parts)
        if instance.state is InstanceState.ATTACHING and attached:
            self._step(instance, InstanceEvent.CONFIRMED)
            instance.tell_ready()

    def tell_parts(self, instance: Instance) -> None:
        """Send the ranks that have not confirmed their part that part again, or have yet to say that they connected."""
        for rank in instance.parts:
            waits = rank.connecting if rank.attached else instance.state is InstanceState.ATTACHING
            if rank.connected and waits:
                self._send_part(rank)

    def detach(self, rank: PrefillRank) -> None:
        """Take a rank's part away, and leave its connection."""
        connection = rank.detach()
        if connection is not None:
            self._context.connections.leave(connection)

    def _step(self, instance: Instance, event: InstanceEvent) -> bool:
        return instance.step(event, self._context.now())
