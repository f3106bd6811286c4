"""The decode ranks that a prefill rank serves: their handshakes, attachments, signs of life and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink import wire
from statelink._logs import logger
from statelink.backend import UNKNOWN, RegionTable
from statelink.errors import MismatchError, Reason, WireError
from statelink.link._reasons import PeerInfo, seconds_since
from statelink.link.peers import (
    DECODE_RANK,
    MAX_WAITING,
    Carrier,
    HeldHellos,
    RankEvent,
    RankState,
    Witness,
    can_receive,
    check_peer,
    check_transport,
    is_sibling,
    known_transport,
    tells_transport,
    transport_of,
)
from statelink.plan import PairPlan, compile_pair

from ._line import Line

if TYPE_CHECKING:
    from statelink.backend import Backend
    from statelink.link._context import Context
    from statelink.link.peers import Connection

__all__ = ["DecodeRank", "DecodeRanks", "Refusal"]

log = logger("statelink.link")

MAX_PEERS = 4096
"""Most decode ranks that one prefill rank serves."""
FIND_OUT_SECONDS = 2.0
"""Seconds that a link of the role ``both`` gives its backend to find out a peer's transport, where one is required. Its
backend may have connected before the peer's was ready."""


class DecodeRank:
    """A decode rank that introduced itself. Any thread may read it.

    The control thread changes it, except that the job which attaches it sets the witness, on a data thread.

    Args:
        handshake: Its handshake.
        regions: Its region table, for checks.
        backend: This side's backend.
        now: When it introduced itself.

    Attributes:
        name: Its link name.
        state: How far it is.
        asked: The part that it named last.
        plan: What this rank writes for it; set once it is attached and the backend reaches it.
        connection: This side's connection to it. The only rank of an instance has one from the beginning, since every
            decode rank needs it, if no transport is required. Others have one once the decode rank named their part.
        line: The pushes to it; set with the plan.
        witness: Tells whether its process has ended; ``None`` where that cannot be seen from here.
        expected: Decode ranks of its instance that ask this rank for each room; before it is attached, all of them.
        heard: When its last message came.
        since: When it introduced itself.
        has_pong: Whether a Pong was sent to it since the last heartbeat.
    """

    def __init__(self, handshake: wire.Handshake, regions: RegionTable, backend: Backend, now: float) -> None:
        self.handshake = handshake
        self.name = handshake.link
        self.regions = regions
        self.heard = now
        self.since = now
        self.state = RankState.GREETED
        self.asked: wire.Attach | None = None
        self.plan: PairPlan | None = None
        self.connection: Connection | None = None
        self.witness: Witness | None = None
        self.line: Line | None = None
        self.expected = handshake.inventory.ranks
        self._backend = backend
        self.has_pong = True

    @property
    def exited(self) -> bool:
        """Whether it is proven that its process has ended."""
        return self.witness is not None and self.witness.ended()

    @property
    def info(self) -> PeerInfo:
        """What diagnostics say of it."""
        return PeerInfo(self.name, self.handshake.inventory.rank, self.heard)

    def transport(self) -> str:
        """The transport that carries this side's bytes to it, as far as the backend knows it. Any thread."""
        return self.carrier().transport

    def carrier(self) -> Carrier:
        """The same, with what is wrong with the backend's answer. Any thread."""
        connection = self.connection
        made = connection is not None and connection.made
        return transport_of(self._backend, self.name) if made else Carrier(UNKNOWN)

    def finds_out(self) -> bool:
        """Whether the backend tells the transport, and does not know it yet. Any thread."""
        return self.transport() == UNKNOWN and tells_transport(type(self._backend))

    def step(self, event: RankEvent) -> bool:
        """Take the step that an event leads to. Returns whether the table has one for the present state."""
        state = DECODE_RANK[self.state].get(event)
        if state is None:
            return False
        self.state = state
        return True

    def count_sleep(self, late: float) -> None:
        """Do not count the seconds for which this process did not run as silence of the rank."""
        self.heard += late

    def needs_pong(self) -> bool:
        """Whether it got no Pong since the last call of this method."""
        needed, self.has_pong = not self.has_pong, False
        return needed

    def attach(self, plan: PairPlan, expected: int, line: Line) -> None:
        """Note that it is attached.

        Args:
            plan: What this rank writes for it.
            expected: Decode ranks of its instance that ask this rank for each room.
            line: Takes the pushes to it, unless it was attached before.
        """
        self.line = self.line or line
        self.plan = plan
        self.expected = expected


class Refusal(NamedTuple):
    """A peer and this link found that they do not fit.

    Attributes:
        at: When, on the link's clock.
        peer: The peer's link name.
        reason: Why.
    """

    at: float
    peer: str
    reason: Reason


class DecodeRanks:
    """The decode ranks that introduced themselves. Belongs to the control thread.

    Args:
        context: The link's parts.
        lost: Called with a rank that was lost, and why.
        settled: Called with a rank once it is attached or was refused.

    Attributes:
        refusal: The last refusal, by this link or of it; ``None`` if there was none.
    """

    refusal: Refusal | None = None

    def __init__(
        self,
        context: Context,
        lost: Callable[[DecodeRank, str], None],
        settled: Callable[[DecodeRank], None],
    ) -> None:
        self._context = context
        self._lost = lost
        self._settled = settled
        self._ranks: dict[str, DecodeRank] = {}
        self._given_up: dict[str, None] = {}
        """Names of ranks that this side gave up and that have not come back, the oldest first. A rank need not know."""
        self._waiting: HeldHellos | None = None
        """While the link is suspended, the ``Hello`` of each peer that sent one; otherwise ``None``."""

    def get(self, name: str) -> DecodeRank | None:
        """The rank with this link name, if it is known."""
        return self._ranks.get(name)

    @property
    def known(self) -> list[DecodeRank]:
        """Every rank that introduced itself and was not lost. Any thread."""
        return list(self._ranks.values())

    def speaker(self, message: wire.Message) -> DecodeRank | None:
        """The known rank that sent a message. Notes that the rank is alive.

        ``None`` if the rank is not known, or if the message is for an earlier process at this link's address.
        """
        rank, context = self._ranks.get(message.sender), self._context
        if rank is not None:
            rank.heard = context.now()
        return rank if message.to == context.name else None

    def handle(self, message: wire.Message, rank: DecodeRank) -> None:
        """Handle a message that is not about a room, from a known rank."""
        if isinstance(message, wire.Ping):
            rank.has_pong = True
            self._context.channel.send(wire.Pong(sender=self._context.name, to=message.sender))
        elif isinstance(message, wire.Attach):
            self._attach(message, rank)
        elif isinstance(message, wire.Refuse):
            log.warning("%s refused this instance: %s", rank.name, message.reason.coded)
            self._note_refusal(rank.name, message.reason)
        elif isinstance(message, wire.Bye):
            if message.registration >= rank.handshake.registration:  # if not, it has come back before this came
                self._lose(rank, "it was suspended" if message.suspended else "it closed")
        else:
            log.debug("a %s message of %s is not for prefill", type(message).__name__.lower(), rank.name)

    def send(self, message: wire.Message) -> None:
        """Queue a message for a rank. If that fails, give the rank up: it would wait forever for the message."""
        if not self._context.channel.send(message):
            # Losing a rank changes rooms, and the caller may be working on a room. So the loss is posted.
            self._context.post_job(self._unreachable, message.to)

    def knows(self, name: str) -> bool:
        """Whether a link of this name has introduced itself."""
        return name in self._ranks

    def hello(self, message: wire.Hello) -> None:
        """Handle the handshake of a decode rank, or of another rank of this link's own instance.

        While the link is suspended, the message waits, because this link has no descriptor to answer with.
        """
        if self._waiting is not None:
            try:
                self._waiting.add(message)
            except WireError as error:
                self._context.channel.count(error)
            return
        ours, backend = self._context.handshake, self._context.backend.name

        # Runs on the control thread. For a large handshake, it runs on a data thread.
        def check(handshake: wire.Handshake) -> tuple[wire.Handshake, RegionTable]:
            check_peer(ours, handshake, sends=True)
            return handshake, RegionTable(handshake.inventory.regions, backend)

        def then(made: tuple[wire.Handshake, RegionTable] | None, reason: Reason | None) -> None:
            if self._waiting is not None:
                self.hello(message)
                return
            if made is not None:
                reason = self._greet(message.sender, *made)
            if reason is not None:
                log.warning("refused a peer: %s", reason.coded)
                self._note_refusal(message.sender, reason)
                self._context.channel.send(wire.Refuse(sender=self._context.name, to=message.sender, reason=reason))

        self._context.reader.read(message.sender, message.handshake, check, then)

    def _greet(self, sender: str, handshake: wire.Handshake, regions: RegionTable) -> Reason | None:
        """Welcome a peer whose handshake was accepted. Returns why not, if there are too many."""
        ours = self._context.handshake
        serves = can_receive(handshake.role) and not is_sibling(ours, handshake) and handshake.link == sender
        known = self._ranks.get(handshake.link)
        if serves and known is not None and known.handshake.registration < handshake.registration:
            self._lose(known, "it has registered its memory anew")
        if serves and handshake.link not in self._ranks:
            if len(self._ranks) >= MAX_PEERS:
                return Reason("peer.many", f"this link has {MAX_PEERS} peers already", {"link": self._context.name})
            rank = DecodeRank(handshake, regions, self._context.backend, self._context.now())
            self._ranks[handshake.link] = rank
            if ours.inventory.ranks == 1 and not self._context.config.require:
                # Where a transport is required, it is found out while the backend connects. That cannot be done before
                # the rank's side has connected.
                self._connect_ahead(rank)
            if handshake.link in self._given_up:
                # The rank may have sent its Hello before this side lost it. Then it does not know of the loss, and
                # would never attach again. If it does know, it waits for the Welcome and ignores this message.
                del self._given_up[handshake.link]
                self._context.channel.send(wire.Unknown(sender=self._context.name, to=sender))
        self._context.channel.send(
            wire.Welcome(sender=self._context.name, to=sender, handshake=self._context.announcement)
        )
        return None

    def _connect_ahead(self, rank: DecodeRank) -> None:
        """Let the backend connect while the first messages travel, and the rank's side has yet to connect."""
        context = self._context
        connection = rank.connection = context.connections.join(rank.handshake)

        def then(_: None, reason: Reason | None) -> None:
            if reason is not None:  # if the rank attaches, this is tried again, and then refuses the rank
                log.debug("%s is not connected yet: %s", rank.name, reason.coded)

        who = {"backend": context.backend.name, "peer": rank.name}
        context.workers.run(
            context.workers.setups, ("peer", rank.name), lambda: context.connections.make(connection), then, **who
        )

    def _attach(self, message: wire.Attach, rank: DecodeRank) -> None:
        if rank.state is RankState.ATTACHED and rank.plan is not None and rank.plan.digest == message.digest:
            self._confirm(rank, rank.plan)
            return
        if rank.state is RankState.ATTACHING and rank.asked == message:
            return  # decode repeats it at each heartbeat, and a large plan is compiled for longer
        rank.asked = message
        rank.step(RankEvent.ASSIGNED)
        context = self._context
        workers, who = context.workers, {"backend": context.backend.name, "peer": rank.name}
        require, patience = context.config.require, FIND_OUT_SECONDS if context.config.role == "both" else 0.0
        connection = rank.connection
        if connection is None:
            connection = context.connections.join(rank.handshake)
            rank.connection = connection

        # The first two run on data threads, the other two on the control thread.
        def compile_part() -> PairPlan:
            if message.same_host and rank.witness is None:
                rank.witness = Witness.of(rank.handshake.process, None)
            plan = self._compile(message, rank)
            # The backend is called with the peer's key, in order with all its other calls about this peer. Compiling
            # has another key, so that it does not wait for these calls.
            workers.run(
                workers.setups,
                ("peer", rank.name),
                connect,
                lambda _, reason: connected(plan, reason),
                **who,
            )
            return plan

        def connect() -> None:
            context.connections.make(connection)
            carrier = known_transport(require, rank.carrier, patience)
            check_transport(require, carrier, context.backend.name, rank.name)

        def connected(plan: PairPlan, reason: Reason | None) -> None:
            self._attached(rank, message, plan, reason)

        def compiled(plan: PairPlan | None, reason: Reason | None) -> None:
            if plan is None:
                self._attached(rank, message, None, reason)
            elif rank.state is RankState.ATTACHING and rank.asked is message and not connection.made and not require:
                self._confirm(rank, plan)  # its requests come while the backend connects

        workers.run(workers.setups, ("plan", rank.name), compile_part, compiled, **who)

    def _compile(self, message: wire.Attach, rank: DecodeRank) -> PairPlan:
        ours = self._context.inventory
        theirs = rank.handshake.inventory
        assignment = message.assignment
        if (assignment.source, assignment.target) != (ours.rank, theirs.rank):
            raise MismatchError(
                "an assignment is for other ranks",
                cause=f"from {assignment.source} to {assignment.target}; these are {ours.rank} and {theirs.rank}",
                code="mismatch.assignment",
            )
        plan = compile_pair(ours, theirs, assignment)
        if plan.digest != message.digest:
            raise MismatchError(
                "the two sides compile different plans from one assignment",
                cause=f"{message.digest.hex()} on decode, {plan.digest.hex()} on prefill",
                hint="install the same version of statelink on both sides",
                code="mismatch.digest",
            )
        return plan

    def _attached(self, rank: DecodeRank, message: wire.Attach, plan: PairPlan | None, reason: Reason | None) -> None:
        if rank.asked is not message:
            return  # it has named another part since, which its requests are for
        refused = plan is None or reason is not None
        if not rank.step(RankEvent.REFUSED if refused else RankEvent.COMPILED):
            return
        if plan is None or reason is not None:
            if reason is None:
                log.warning("refused %s", rank.name)
            else:
                log.warning("refused %s: %s", rank.name, reason.coded)
                self._note_refusal(rank.name, reason)
                self._context.channel.send(wire.Refuse(sender=self._context.name, to=rank.name, reason=reason))
        else:
            rank.attach(plan, message.destinations, Line(self._context, rank.name))
            self._confirm(rank, plan)
        self._settled(rank)

    def _note_refusal(self, peer: str, reason: Reason) -> None:
        self.refusal = Refusal(self._context.now(), peer, reason)

    def _confirm(self, rank: DecodeRank, plan: PairPlan) -> None:
        connecting = rank.state is RankState.ATTACHING
        transport = "" if connecting else rank.transport()
        us = self._context.name
        self._context.channel.send(
            wire.Attached(sender=us, to=rank.name, digest=plan.digest, transport=transport, connecting=connecting)
        )

    def beat(self, now: float, late: float) -> None:
        """See `Role.beat`."""
        for rank in list(self._ranks.values()):
            rank.count_sleep(late)
            silent = now - rank.heard
            if rank.exited:
                self._give_up(rank, "its process has ended")
            elif silent > self._context.config.liveness:
                self._give_up(rank, f"it has been silent for {silent:.1f} s")
            elif rank.needs_pong():  # its Ping may be queued behind large requests, so send a Pong without one
                self._context.channel.send(wire.Pong(sender=self._context.name, to=rank.name))

    def _unreachable(self, name: str) -> None:
        rank = self._ranks.get(name)
        if rank is not None:
            self._give_up(rank, "a message could not be sent to it")

    def _give_up(self, rank: DecodeRank, why: str) -> None:
        """Lose a rank that may not know that it was lost."""
        log.warning("lost decode rank %s: %s", rank.name, why)
        self._lose(rank, why)
        self._given_up[rank.name] = None
        if len(self._given_up) > MAX_PEERS:
            del self._given_up[next(iter(self._given_up))]

    def _lose(self, rank: DecodeRank, why: str) -> None:
        rank.step(RankEvent.LOST)
        del self._ranks[rank.name]
        self._lost(rank, why)
        if rank.connection is not None:
            self._context.connections.leave(rank.connection)

    def suspend(self, in_flight: set[str]) -> None:
        """Say goodbye to every rank, forget it, and welcome nobody. ``in_flight``: as for `close`."""
        self._say_goodbye(in_flight, suspended=True)
        self._waiting = HeldHellos(MAX_PEERS, MAX_WAITING)
        for rank in list(self._ranks.values()):
            self._lose(rank, "this link was suspended")

    def resume(self) -> None:
        """Handle the handshakes that came while the link was suspended."""
        waiting, self._waiting = self._waiting, None
        for hello in waiting.all if waiting is not None else ():
            self.hello(hello)

    def close(self, in_flight: set[str]) -> None:
        """Say goodbye to every rank, and whether no write to it is in flight. ``in_flight``: ranks with such writes."""
        self._say_goodbye(in_flight, suspended=False)

    def _say_goodbye(self, in_flight: set[str], *, suspended: bool) -> None:
        us, registration = self._context.name, self._context.handshake.registration
        for name in self._ranks:
            drained = name not in in_flight
            self._context.channel.send(
                wire.Bye(sender=us, to=name, drained=drained, registration=registration, suspended=suspended)
            )

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """Every known rank: its state, how long it has been known, and seconds since it was heard. Any thread.

        It may have been heard after ``now``, which is the snapshot's.
        """
        return [
            {
                "peer": rank.name,
                "role": "decode",
                "rank": rank.handshake.inventory.rank,
                "instance": rank.handshake.inventory.instance,
                "state": rank.state.value,
                "age": seconds_since(rank.since, now),
                "heard": seconds_since(rank.heard, now),
                "transport": rank.transport(),
            }
            for rank in self.known
        ]

    def snapshot(self) -> dict[str, tuple[str, list[str]]]:
        """See `Role.snapshot`. Any thread."""
        return {rank.name: (rank.state.value, [rank.name]) for rank in self.known}
